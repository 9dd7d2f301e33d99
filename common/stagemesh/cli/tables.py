"""A head's answers as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from stagemesh.cli.terminal import mebibytes, seconds
from stagemesh.client.admin import AdminClient
from stagemesh.client.pipelines import PipelineInfo
from stagemesh.client.sync import Client
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.wire import enum_word

_STYLES = {
    "ready": "green",
    "live": "green",
    "assigned": "yellow",
    "starting": "yellow",
    "suspect": "yellow",
    "draining": "yellow",
    "missing": "red",
    "failed": "red",
    "gone": "dim",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a head says of its mesh at one moment."""

    pipelines: Sequence[PipelineInfo]
    nodes: Sequence[admin_pb.NodeInfo]
    replicas: Sequence[registry_pb.ReplicaStatus]
    missing: Sequence[admin_pb.MissingSlot]
    requests: Sequence[admin_pb.RequestInfo]


def take_snapshot(client: Client, admin: AdminClient, *, include_gone: bool = False) -> Snapshot:
    """Ask the head."""
    replicas, missing = admin.list_replicas(include_gone=include_gone)
    return Snapshot(client.list_pipelines(), admin.list_nodes(), replicas, missing, admin.list_requests())


def status_view(snapshot: Snapshot, *, show_requests: bool = False) -> Group:
    """Stages, replicas and nodes."""
    parts: list[Table | Text] = [
        stages_table(snapshot.pipelines),
        replicas_table(snapshot.replicas, snapshot.missing),
        nodes_table(snapshot.nodes),
    ]
    if show_requests:
        parts.append(requests_table(snapshot.requests))
    return Group(*[piece for part in parts for piece in (part, Text(""))][:-1])


def stages_table(pipelines: Iterable[PipelineInfo]) -> Table:
    """Pipelines and their stages."""
    table = _table("PIPELINE", "STAGE", "TYPE", "ENGINE", "MODEL", "READS", "GIVES", "READY")
    for pipeline in pipelines:
        for position, stage in enumerate(pipeline.stages):
            is_whole = stage.ready_replicas >= stage.target_replicas
            style = "green" if is_whole else "yellow" if stage.ready_replicas else "red"
            table.add_row(
                f"{pipeline.name} [dim]{pipeline.revision}[/]" if position == 0 else "",
                stage.name,
                stage.stage_type,
                stage.engine,
                escape(stage.model),
                ", ".join(stage.inputs) or "[dim]prompt[/]",
                stage.output_modality if stage.is_output else "",
                f"[{style}]{stage.ready_replicas} of {stage.target_replicas}[/]",
            )
    return table


def replicas_table(
    replicas: Iterable[registry_pb.ReplicaStatus], missing: Iterable[admin_pb.MissingSlot] = ()
) -> Table:
    """Replicas, also the missing ones."""
    table = _table("REPLICA", "STATE", "NODE", "DEVICES", "ENDPOINT", "TASKS", "STEPS", "MEMORY", "SEEN", "")
    for row in replicas:
        report, load = row.report, row.report.load
        detail = row.reason
        if row.state in (replica_pb.REPLICA_STATE_ASSIGNED, replica_pb.REPLICA_STATE_STARTING):
            detail = report.phase or row.reason
        if report.restarts:
            detail = f"{detail} [restarted {report.restarts} ×]".strip()
        table.add_row(
            replica_name(report.replica),
            _state(enum_word(replica_pb.ReplicaState, row.state)),
            escape(row.node_id),
            ", ".join(report.device_ids),
            report.endpoint,
            f"{load.running} + {load.waiting}" if report.HasField("load") else "",
            f"{load.engine_steps:,}" if load.engine_steps else "",
            mebibytes(load.memory_bytes) if load.memory_bytes else "",
            f"{seconds(row.lease_age.ToNanoseconds() / 1e9)} ago" if row.HasField("lease_age") else "",
            escape(_one_line(detail)),
        )
    for slot in missing:
        table.add_row(replica_name(slot.replica), _state("missing"), *[""] * 7, escape(_one_line(slot.reason)))
    return table


def nodes_table(nodes: Iterable[admin_pb.NodeInfo]) -> Table:
    """Nodes and their devices."""
    table = _table("NODE", "STATE", "HOST", "ADDRESS", "SERVES", "REPLICAS", "DEVICES", "FREE", "VERSION", "SEEN")
    for node in nodes:
        table.add_row(
            escape(node.node_id),
            _state(enum_word(admin_pb.NodeState, node.state)),
            escape(node.hostname),
            node.peer,
            ", ".join(node.stages) or "any",
            ", ".join(replica_name(replica) for replica in node.replicas),
            ", ".join(device.id for device in node.devices),
            ", ".join(node.free_device_ids) or "[dim]none[/]",
            node.software_version,
            f"{seconds(node.lease_age.ToNanoseconds() / 1e9)} ago" if node.HasField("lease_age") else "",
        )
    return table


def requests_table(requests: Iterable[admin_pb.RequestInfo], *, limit: int = 50) -> Table:
    """Requests in flight, oldest first."""
    table = _table("REQUEST", "PIPELINE", "AGE", "TASKS")
    rows = list(requests)
    for request in rows[:limit]:
        tasks = ", ".join(_task(task) for task in request.tasks)
        table.add_row(escape(request.request_id), request.pipeline, seconds(request.age.ToNanoseconds() / 1e9), tasks)
    if len(rows) > limit:
        table.add_row(f"[dim]and {len(rows) - limit} more[/]")
    return table


def replica_name(replica: replica_pb.ReplicaRef) -> str:
    """`painter/0`."""
    return f"{replica.stage}/{replica.replica_id}"


def _task(task: admin_pb.TaskInfo) -> str:
    where = f" on {task.replica.replica_id}" if task.HasField("replica") else ""
    again = f", attempt {task.attempt}" if task.attempt > 1 else ""
    return f"{task.stage}{task.companion and f' ({task.companion})'} {task.state}{where}{again}"


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        # What people copy is never cut; what is only read may be.
        table.add_column(name, no_wrap=name != "", overflow="fold")
    return table


def _state(word: str) -> str:
    return f"[{_STYLES.get(word, 'white')}]{word}[/]"


def _one_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
