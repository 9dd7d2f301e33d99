"""What every engine is to its replica: one class, four verbs (start, run, call, stop).

An engine computes in processes of its own; its `run` only waits and forwards, so that the replica's event loop always
has time for heartbeats and aborts. Cancelling `run` is how a task is aborted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stagemesh.config import Stage
from stagemesh.telemetry.context import TraceContext
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb

PROBE_TEXT = "hello"


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """The devices a replica was given."""

    ids: tuple[str, ...]
    """Ids on the node, such as ("cuda:0",) or ("cpu:1",)."""
    cores: tuple[int, ...] = ()
    """Core numbers, for CPU core sets."""
    physical_ids: tuple[str, ...] = ()
    """What the visible-devices variable takes, for accelerators."""

    @property
    def kind(self) -> str:
        """Kind of the devices: "cpu", "cuda", "rocm", "npu" or "xpu"."""
        return self.ids[0].split(":", 1)[0] if self.ids else "cpu"


@dataclass(frozen=True, slots=True)
class EngineInput:
    """What an adapter made of a task's prompt and upstream outputs, in one of the forms that engines read."""

    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    """Chat messages: role, content."""
    token_ids: tuple[int, ...] | None = None
    embeds: Any = None
    """NumPy array [tokens, hidden] or None."""
    negative_text: str | None = None
    media: tuple[Any, ...] = ()
    """`prompt_pb2.MediaInput` messages."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Named NumPy arrays."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else an adapter has to say; a further chunk's own `sampling_pb2.SamplingParams` are in "params"."""


@dataclass(slots=True)
class EngineTask:
    """One visit of a request to this stage."""

    submit: stage_pb.SubmitTask
    """The head's command, with merged sampling parameters."""
    input: EngineInput
    more_input: AsyncIterator[EngineInput] | None = None
    """Further chunks, for streaming input and for edges of mode stream."""

    @property
    def trace_headers(self) -> dict[str, str] | None:
        """The span that an engine's own ones belong to, as W3C headers; None when nobody traces the request."""
        return TraceContext(self.submit.traceparent, self.submit.tracestate).headers() or None


class TaskSink(Protocol):
    """Where `run` puts what it makes. All methods are synchronous and cheap; the replica batches behind them.

    Exactly one of `finish` or an exception ends a task; a cancelled `run` ends it as aborted.
    """

    def started(self, engine_queue_s: float = 0.0) -> None:
        """The engine began; seconds that the task waited inside the replica."""

    def tokens(self, token_ids: Sequence[int], text: str) -> None:
        """New token ids and their text (completion 0, no log-probabilities): the fast path."""

    def text(self, delta: frame_pb.TextDelta) -> None:
        """New text of any completion, with log-probabilities."""

    def progress(self, progress: frame_pb.Progress) -> None:
        """A step was made."""

    def media(self, media: frame_pb.MediaOutput) -> None:
        """A file is complete."""

    def audio(self, chunk: frame_pb.AudioChunk) -> None:
        """A piece of sound."""

    def tensor(self, name: str, array: Any) -> None:
        """A named NumPy array; the replica decides whether it goes inline or by reference."""

    def finish(self, finished: frame_pb.StageFinished) -> None:
        """The task ended well."""

    @property
    def writable(self) -> bool:
        """Whether `ready` would return at once."""

    async def ready(self) -> None:
        """Wait until the consumer has credit for another frame; returns at once where there is no limit."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    steps: int = 0
    """Engine steps since start; grows while there is work."""
    since_progress_s: float = 0.0
    """Seconds since the last step or output while there is unfinished work; 0 when idle."""
    prompt_tokens_computed: int = 0
    """Since start, as the next two: prompt tokens that the engine computed itself."""
    prompt_tokens_cached: int = 0
    """Found in its own prefix cache."""
    prompt_tokens_received: int = 0
    """Taken over from a prefill engine, as KV blocks."""


class EngineConfigError(ValueError):
    """The engine refuses the stage's configuration; the text names the path and what would be right."""


class Engine(ABC):
    """One engine with one model."""

    name: str = ""
    call_methods: frozenset[str] = frozenset()
    """Control methods that `call` knows."""
    max_concurrency: int = 0
    """Tasks it works on at once; 0 when it has no bound of its own."""

    version: str = ""
    """Version of the engine's library; may be set as late as `start`."""
    host: str = "127.0.0.1"
    """How other replicas reach this machine; set before `prepare`."""

    def __init__(self, stage: Stage, devices: DeviceSet) -> None:
        self.stage = stage
        self.devices = devices
        self.replica_id = 0
        """Number within the stage; set before `prepare`."""
        self.report_phase: Callable[[str], None] = lambda phase: None
        """Say what `prepare` and `start` are doing, for people: "loading weights"."""

    @classmethod  # noqa: B027  (optional step)
    def check(cls, stage: Stage) -> None:
        """Check `stage.engine_args` and `stage.default_sampling_params` against the engine's real fields.

        Raises:
            EngineConfigError: with a did-you-mean.
        """

    def prepare(self) -> None:  # noqa: B027  (optional step)
        """What must happen before a thread, an event loop or a gRPC object exists (vLLM forks its core here)."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model. Raises with the engine's own words."""

    def probe_task(self) -> stage_pb.SubmitTask:
        """The least work that it can do, one token or one step, for the self-probe; asked for once it has started."""
        task = stage_pb.SubmitTask()
        task.prompt.text = PROBE_TEXT
        if self.stage.stage_type == "diffusion":
            task.params.diffusion.num_inference_steps = 1
            task.params.diffusion.num_images_per_prompt = 1
            task.params.diffusion.seed = 0
        else:
            task.params.llm.max_tokens = 1
            task.params.llm.temperature = 0.0
        return task

    @abstractmethod
    async def run(self, task: EngineTask, sink: TaskSink) -> None:
        """Run one task to its end.

        Raises:
            MeshError: this task failed; others are not touched.
            asyncio.CancelledError: re-raised when cancelled, after the engine let go of the task.
        """

    def probe_input(self, given: EngineInput) -> EngineInput:
        """What the self-probe runs; `given` is a short text. For engines that read something else."""
        return given

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a control method of `call_methods`; the result is JSON-able."""
        raise NotImplementedError(method)

    @abstractmethod
    def load(self) -> EngineLoad:
        """How busy it is, without waiting."""

    @abstractmethod
    async def died(self) -> str:
        """Wait until the engine can no longer serve; returns why, with its last lines."""

    async def check_progress(self, timeout_s: float) -> None:  # noqa: B027  (optional step)
        """Prove that the engine answers within `timeout_s`; raises MeshError(ENGINE_STUCK) otherwise."""

    @abstractmethod
    async def stop(self) -> None:
        """Free devices and end the engine's processes; also after a failed start, and twice."""
