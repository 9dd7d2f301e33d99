"""The typed frames that `generate()` yields.

Every frame says which request, stage and replica it comes from, and where it stands in the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as PillowImage

    from stagemesh.v1 import frame_pb2 as frame_pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What all frames have."""

    request_id: str
    sequence: int
    """Position in the request's stream, from 1."""
    stage: str = ""
    """Stage that made it; empty on `Finished`."""
    replica_id: int = 0
    """Replica that made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The best tokens at one position, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta(Frame):
    """Text and tokens since the last such frame of the same completion."""

    text: str
    token_ids: tuple[int, ...] = ()
    index: int = 0
    """Completion, 0 unless n > 1."""
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Media(Frame):
    """An encoded file: picture, sound or video."""

    mime_type: str
    data: bytes = field(repr=False)
    """The file's bytes."""
    index: int = 0
    """Which of several outputs of the stage, from 0."""
    seed: int | None = None
    """Seed it was made with; None where none applies."""

    @property
    def suffix(self) -> str:
        """File name suffix that fits, such as `.png`."""
        return _SUFFIXES.get(self.mime_type, "." + self.mime_type.rpartition("/")[2].partition(";")[0])

    def save(self, path: str | Path) -> Path:
        """Write the file; folders on the way are made. Returns its path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.data)
        return path


_SUFFIXES = {
    "image/jpeg": ".jpg",
    "audio/mpeg": ".mp3",
    "audio/x-wav": ".wav",
    "application/octet-stream": ".bin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image(Media):
    """A picture."""

    width: int = 0
    height: int = 0

    def to_pil(self) -> PillowImage:
        """The picture decoded. Needs Pillow (`pip install pillow`)."""
        from io import BytesIO

        import PIL.Image

        picture = PIL.Image.open(BytesIO(self.data))
        picture.load()
        return picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio(Media):
    """A sound file."""

    sample_rate_hz: int = 0

    @classmethod
    def from_chunks(cls, chunks: Sequence[AudioChunk]) -> Audio:
        """All pieces of a sound (at least one), in their order, as a WAV file of 16 bits."""
        import io
        import wave

        import numpy as np

        samples, first = np.concatenate([chunk.samples for chunk in chunks]), chunks[0]
        if samples.dtype != np.int16:
            samples = (np.clip(samples, -1, 1) * 32767).astype("<i2")
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
            file.setsampwidth(2)
            file.setframerate(first.sample_rate_hz)
            file.writeframes(samples.tobytes())
        return cls(
            request_id=first.request_id,
            sequence=chunks[-1].sequence,
            stage=first.stage,
            replica_id=first.replica_id,
            mime_type="audio/wav",
            data=buffer.getvalue(),
            sample_rate_hz=first.sample_rate_hz,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Video(Media):
    """A video file."""

    width: int = 0
    height: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Frame):
    """A step was made."""

    step: int
    total_steps: int
    """0 when unknown."""
    preview: Media | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioChunk(Frame):
    """A piece of raw sound."""

    samples: np.ndarray
    """float32 in [-1, 1] or int16, [samples] or [samples, channels]."""
    sample_rate_hz: int
    offset_samples: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFrame(Frame):
    """A named tensor."""

    name: str
    dtype: str
    """Element type as the stage names it. `bfloat16`, which NumPy lacks, arrives as its bits in uint16."""
    array: np.ndarray = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference(Frame):
    """A large output that stayed with its replica; the client's `fetch` brings it.

    It is good while its request runs and for a minute after its end.
    """

    kind: str
    """What `fetch` returns: tensor, image, audio, video or audio_chunk."""
    dtype: str
    """Element type; uint8 for a file."""
    shape: tuple[int, ...]
    """A file's is its length."""
    size_bytes: int
    name: str = ""
    """Of a tensor."""
    index: int = 0
    """Of a file: which of several outputs of the stage, from 0."""
    message: frame_pb.Frame = field(repr=False)
    """As it came from the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Work done."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    diffusion_steps: int = 0
    images: int = 0
    audio_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a stage's time went, in seconds."""

    queue_s: float = 0.0
    """Wait at the head for a replica."""
    engine_queue_s: float = 0.0
    """Wait inside the replica before the engine began."""
    first_output_s: float = 0.0
    """From submission to the first output."""
    total_s: float = 0.0
    """From submission to the end."""
    transfer_s: float = 0.0
    """Bringing the outputs of the stages before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What it cost to bring a stage the output of one before it."""

    source: str
    """The stage that made it."""
    size_bytes: int
    """Of its text, tokens, files and tensors."""
    duration_s: float
    """Until all of it was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFinished(Frame):
    """A stage is done with the request."""

    finish_reason: str
    """stop, length, complete or abort."""
    stop_reason: str = ""
    usage: Usage = Usage()
    timings: Timings = Timings()
    replicas: tuple[int, ...] = ()
    """Replicas that worked on it, in order; more than one after a loss was survived."""
    recovery: str = ""
    """How a lost replica was survived: "" (none was lost), exact, continued or restarted."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    """From each stage before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Frame):
    """The end of the request."""

    finish_reason: str
    """complete or abort."""
    usage: Usage = Usage()
    total_s: float = 0.0
    """From arrival at the head to the end, in seconds."""
    stages: Mapping[str, StageFinished] = field(default_factory=dict)
    """Every stage that ran, by name, output stage or not."""
    companions: Mapping[str, StageFinished] = field(default_factory=dict)
    """The companions of the first stage's prompt, by their suffix."""
