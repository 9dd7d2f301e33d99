"""Whether a node may join, and if not, the sentence that says why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from stagemesh import __version__
from stagemesh.names import CONTRACT_VERSION, LABEL, LABEL_WORDS
from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import device_pb2 as device_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh_head.registry.devices import may_share
from stagemesh_head.registry.state import MAX_REPLICAS, Node, StageEntry, StageKey
from stagemesh_head.registry.words import hint, pipeline_named

MAX_DEVICES, MAX_LABELS, MAX_RUNNING, MAX_TEXT = 1_024, 64, 4_096, 256
MAX_ORDER = 2**63
"""Of a scaling; there must be room for the orders that follow."""
_VERSION = re.compile(r"(\d+)\.(\d+)(\.|$)")


def check_form(hello: registry_pb.Hello) -> None:
    """Refuse a Hello that is malformed by itself.

    Raises:
        MeshError: VERSION_MISMATCH, INVALID_REQUEST or NODE_REFUSED.
    """
    _check_versions(hello)
    if not LABEL.fullmatch(hello.node_id):
        raise invalid("hello.node_id", hello.node_id, f"must be {LABEL_WORDS}")
    if not 0 < len(hello.incarnation) <= 64:
        raise invalid("hello.incarnation", hello.incarnation, "must have 1 to 64 characters")
    if len(hello.labels) > MAX_LABELS or any(len(k) + len(v) > MAX_TEXT for k, v in hello.labels.items()):
        raise invalid("hello.labels", len(hello.labels), f"at most {MAX_LABELS} of {MAX_TEXT} characters")
    if len(hello.running) > MAX_RUNNING:
        raise invalid("hello.running", len(hello.running), f"at most {MAX_RUNNING} replicas")
    if len(hello.scaled) > MAX_RUNNING:
        raise invalid("hello.scaled", len(hello.scaled), f"at most {MAX_RUNNING} stages")
    for index, scaled in enumerate(hello.scaled):
        if scaled.replicas > MAX_REPLICAS:
            raise invalid(f"hello.scaled[{index}].replicas", scaled.replicas, f"at most {MAX_REPLICAS}")
        if scaled.order > MAX_ORDER:
            raise invalid(f"hello.scaled[{index}].order", scaled.order, f"at most {MAX_ORDER}")
    if len(hello.hostname) > MAX_TEXT or len(hello.host_id) > MAX_TEXT:
        raise invalid("hello.hostname", hello.hostname, f"host name and host id have at most {MAX_TEXT} characters")
    _check_devices(hello)


def willing_stages(hello: registry_pb.Hello, stages: Mapping[StageKey, StageEntry]) -> frozenset[StageKey]:
    """The stages that the node may be given.

    Raises:
        MeshError: UNKNOWN_PIPELINE, UNKNOWN_STAGE, or NODE_REFUSED when a name fits several pipelines.
    """
    pipelines = list(dict.fromkeys(key.pipeline for key in stages))
    if hello.pipeline:
        pipeline_named(hello.pipeline, pipelines, "hello.pipeline")
    offered = [key for key in stages if hello.pipeline in ("", key.pipeline)]
    if not hello.stages:
        return frozenset(offered)
    chosen = []
    for name in hello.stages:
        found = [key for key in offered if name == key.stage]
        if not found:
            names = list(dict.fromkeys(key.stage for key in offered))
            raise MeshError(
                Reason.UNKNOWN_STAGE,
                f"no pipeline here has a stage {name!r}; there are {', '.join(names)}{hint(name, names)}",
                stage=name,
            )
        if len(found) > 1:
            where = ", ".join(key.pipeline for key in found)
            raise MeshError(
                Reason.NODE_REFUSED,
                f"stage {name!r} is in several pipelines ({where}): the node must name its pipeline",
                stage=name,
            )
        chosen += found
    return frozenset(chosen)


def check_rivals(hello: registry_pb.Hello, nodes: Iterable[Node], now: float, lease_s: float) -> None:
    """Refuse a second node of one id, and a node whose devices another node on its host offers.

    Raises:
        MeshError: NODE_REFUSED, naming the other node.
    """
    own = physical_parts(hello)
    for node in nodes:
        if node.gone_at is not None:
            continue
        if node.node_id == hello.node_id:
            if node.incarnation == hello.incarnation or node.session is None or node.suspect_reason:
                continue  # its own new session, or its successor
            raise MeshError(
                Reason.NODE_REFUSED,
                f"node id {hello.node_id!r} is taken: host {node.hello.hostname!r}, pid {node.hello.pid}, joined "
                f"{now - node.joined_at:.0f} s ago and alive; give this node another id (--node-id)",
                node=hello.node_id,
                conflict="node_id",
                hostname=node.hello.hostname,
                pid=node.hello.pid,
            )
        if hello.host_id and node.hello.host_id == hello.host_id:
            shared = [device for part, device in own.items() if part in physical_parts(node.hello)]
            if shared:
                left = max(0.0, node.last_heartbeat + lease_s - now)
                state = f"silent, its lease ends in {left:.0f} s" if node.suspect_reason else "alive"
                raise MeshError(
                    Reason.NODE_REFUSED,
                    f"node {hello.node_id!r} offers {', '.join(dict.fromkeys(shared))}, which node {node.node_id!r} on "
                    f"the same host (pid {node.hello.pid}, {state}) offers already; give each its own (--devices)",
                    node=hello.node_id,
                    conflict="devices",
                    other=node.node_id,
                )


def check_claims(hello: registry_pb.Hello, stages: Mapping[StageKey, StageEntry]) -> None:
    """Refuse a node that reports two replicas on one device, unless their stages may share it.

    Raises:
        MeshError: NODE_REFUSED, naming both.
    """
    holders: dict[str, list[tuple[StageKey, int]]] = {}
    for report in hello.running:
        key = StageKey(report.replica.pipeline, report.replica.stage)
        for device_id in report.device_ids:
            for other, number in holders.get(device_id, ()):
                if key in stages and other in stages and not may_share(stages[key], stages[other]):
                    raise MeshError(
                        Reason.NODE_REFUSED,
                        f"node {hello.node_id!r} reports {key}/{report.replica.replica_id} and {other}/{number} both "
                        f"on device {device_id}: a device has one replica unless a stage says `shared_devices: true`",
                        node=hello.node_id,
                        conflict="claims",
                        device=device_id,
                    )
            holders.setdefault(device_id, []).append((key, report.replica.replica_id))


def physical_parts(hello: registry_pb.Hello) -> dict[tuple[int, str], str]:
    """What the devices of a node are made of on its host -> device id."""
    parts: dict[tuple[int, str], str] = {}
    for device in hello.devices:
        if device.kind == device_pb.DEVICE_KIND_CPU:
            parts.update({(device.kind, str(core)): device.id for core in device.cores})
        else:
            parts[device.kind, device.physical_id or device.id] = device.id
    return parts


def _check_versions(hello: registry_pb.Hello) -> None:
    if hello.contract_version != CONTRACT_VERSION:
        raise MeshError(
            Reason.VERSION_MISMATCH,
            f"node {hello.node_id!r} speaks version {hello.contract_version!r} of the contract, this head version "
            f"{CONTRACT_VERSION!r}",
            theirs=hello.contract_version,
            ours=CONTRACT_VERSION,
        )
    theirs, ours = _VERSION.match(hello.software_version), _VERSION.match(__version__)
    assert ours is not None
    if theirs is None:
        raise invalid("hello.software_version", hello.software_version, "must be major.minor.patch")
    major, minor = int(theirs[1]), int(theirs[2])
    if major != int(ours[1]) or abs(minor - int(ours[2])) > 1:
        raise MeshError(
            Reason.VERSION_MISMATCH,
            f"node {hello.node_id!r} runs StageMesh {hello.software_version}, this head {__version__}: "
            "they may be one minor version apart",
            theirs=hello.software_version,
            ours=__version__,
        )


def _check_devices(hello: registry_pb.Hello) -> None:
    if not hello.devices:
        raise MeshError(Reason.NODE_REFUSED, f"node {hello.node_id!r} offers no device", node=hello.node_id)
    if len(hello.devices) > MAX_DEVICES:
        raise invalid("hello.devices", len(hello.devices), f"at most {MAX_DEVICES}")
    seen: set[str] = set()
    parts: dict[tuple[int, str], str] = {}
    for index, device in enumerate(hello.devices):
        where = f"hello.devices[{index}]"
        if device.kind == device_pb.DEVICE_KIND_UNSPECIFIED or device.kind not in device_pb.DeviceKind.values():
            raise invalid(f"{where}.kind", device.kind, "must be a known kind")
        if not device.id or len(device.id) > MAX_TEXT:
            raise invalid(f"{where}.id", device.id, f"must have 1 to {MAX_TEXT} characters")
        if device.id in seen:
            raise invalid(f"{where}.id", device.id, "is offered twice")
        seen.add(device.id)
        for part, owner in physical_parts(registry_pb.Hello(devices=[device])).items():
            if part in parts:
                raise MeshError(
                    Reason.NODE_REFUSED,
                    f"node {hello.node_id!r}: devices {parts[part]} and {owner} overlap: both contain {part[1]}",
                    node=hello.node_id,
                    conflict="devices",
                )
            parts[part] = owner
