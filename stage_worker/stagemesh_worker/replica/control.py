"""What a node agent and a replica process tell each other over their socket pair: one JSON object a line.

The agent's first line is an `Assign`. The end of file tells either side that the other is gone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

MAX_LINE_BYTES = 16 << 20
"""Longest line either side reads; a stage's configuration is the largest thing on it."""

TENSOR_THRESHOLD_BYTES = 64 << 10
"""Unless the pipeline says otherwise (64 KiB)."""


class ControlError(ValueError):
    """A line is not a message of this protocol; the text says why."""


@dataclass(frozen=True, slots=True)
class AssignedDevice:
    """One device of a replica."""

    id: str
    """Id on the node, such as "cuda:0" or "cpu:1"."""
    cores: tuple[int, ...] = ()
    """Core numbers of a CPU core set."""
    physical_id: str = ""
    """What the visible-devices variable takes, for accelerators."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Agent to replica, first line: what to be."""

    pipeline: str
    pipeline_revision: str
    stage: dict[str, Any]
    """JSON form of `stagemesh.config.Stage`."""
    replica_id: int
    incarnation: str
    devices: tuple[AssignedDevice, ...] = ()
    listen_host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    host_id: str = ""
    """Identity of the host: replicas with equal ids share memory."""
    progress_timeout_s: float = 60.0
    """An engine that has work and makes no step for so long is unhealthy."""
    adapter_timeout_s: float = 30.0
    """Longest time an input adapter may take."""
    tensor_threshold_bytes: int = TENSOR_THRESHOLD_BYTES
    """Outputs from this size stay here and travel by reference."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Agent to replica: take nothing new, finish what runs; the answer is `Drained`."""

    grace_s: float = 30.0
    """What still runs after so long fails with DRAINING, so that the head sends it elsewhere."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Agent to replica: end now."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Replica to agent: what it does while it starts."""

    phase: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Replica to agent: it answered its own probe at `endpoint` (host:port)."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Load:
    """Replica to agent, about once a second once it is ready."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    engine_steps: int = 0
    since_progress_s: float = 0.0
    memory_bytes: int = 0
    """Resident memory of the replica and its children."""
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_received: int = 0


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """Replica to agent: it cannot serve at the moment."""

    reason: str


@dataclass(frozen=True, slots=True)
class Healthy:
    """Replica to agent: what made it unhealthy is over."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Replica to agent, its last word: it exits with code 3."""

    reason: str
    """A `stagemesh.rpc.Reason`."""
    message: str
    fatal: bool = False
    """The configuration is wrong: a restart would fail again."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Replica to agent: no task is left."""


Message = Assign | Drain | Stop | Phase | Ready | Load | Unhealthy | Healthy | Failed | Drained
EXIT_FAILED = 3
"""Exit code of a replica after `Failed`."""

_TYPES: dict[str, type[Message]] = {
    kind.__name__.lower(): kind
    for kind in (Assign, Drain, Stop, Phase, Ready, Load, Unhealthy, Healthy, Failed, Drained)
}


def encode(message: Message) -> bytes:
    """One line, with its newline."""
    return json.dumps({"type": type(message).__name__.lower(), **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of one line. Unknown keys are ignored, so that versions may differ by an optional field.

    Raises:
        ControlError: not JSON, no known type, a field missing or of the wrong type.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ControlError(f"not JSON: {line[:80]!r}: {error}") from None
    if not isinstance(record, dict) or record.get("type") not in _TYPES:
        shown = record.get("type") if isinstance(record, dict) else record
        raise ControlError(f"type {shown!r}: want one of {', '.join(_TYPES)}")
    kind = _TYPES[record["type"]]
    known = {item.name for item in fields(kind)}
    arguments = {key: value for key, value in record.items() if key in known}
    try:
        if kind is Assign:
            arguments["devices"] = tuple(_device(item) for item in arguments.get("devices", ()))
        return kind(**arguments)
    except (TypeError, KeyError, AttributeError) as error:
        raise ControlError(f"{record['type']}: {error}") from None


def _device(record: dict[str, Any]) -> AssignedDevice:
    return AssignedDevice(record["id"], tuple(record.get("cores", ())), record.get("physical_id") or "")


@dataclass(slots=True)
class LineBuffer:
    """Cuts a byte stream into lines."""

    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[bytes]:
        """Complete lines, without their newline. Raises ControlError when a line grows too long."""
        self._rest += data
        if b"\n" not in data:
            if len(self._rest) > MAX_LINE_BYTES:
                raise ControlError(f"a line is longer than {MAX_LINE_BYTES} bytes")
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        return [line for line in lines if line]
