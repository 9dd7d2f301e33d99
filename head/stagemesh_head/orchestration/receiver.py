"""Takes what one attempt of one task says on its link: output to where it goes, the rest to the state machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_head.orchestration import events as ev
from stagemesh_head.orchestration.references import for_client

if TYPE_CHECKING:
    from stagemesh_head.links.link import Link
    from stagemesh_head.orchestration.stream import ClientStream, TextCursor
    from stagemesh_head.orchestration.task import Task

MAX_PENDING_BYTES = 96 << 20
"""Files, sound and tensors that may wait for one slow client: one frame of the largest size, and some more."""
MAX_PREVIEW_BYTES = 8 << 20
"""A preview that would wait behind more than this is left out: a newer one follows, and its step is told anyway."""


class TaskReceiver:
    """A `LinkTask`. `cursor` and `stream` are None when the client does not get the output as it grows."""

    __slots__ = (
        "_cursor",
        "_events",
        "_feeds_stream",
        "_media",
        "_output",
        "_stream",
        "_tell",
        "_told",
        "link",
        "slot",
        "task",
    )

    def __init__(
        self,
        task: Task,
        link: Link,
        tell: Callable[[ev.Event], None],
        *,
        stream: ClientStream | None,
        cursor: TextCursor | None,
        feeds_stream: bool,
    ) -> None:
        self.task = task
        self.link = link
        self.slot = 0
        """Set by whoever submits; 0 is none."""
        self._tell = tell
        self._stream = stream
        self._cursor = cursor
        self._output = task.output
        self._feeds_stream = feeds_stream
        self._told = False
        """The machine knows of the first output."""
        self._media = 0
        self._events = 0

    @property
    def signs(self) -> int:
        """A number that grows with everything the task says."""
        return self._events + len(self._output.token_ids)

    def on_tokens(self, token_ids: list[int], text: str) -> None:
        """New tokens: the hot path."""
        output = self._output
        output.token_ids += token_ids
        output.texts.append(text)
        if self._cursor is not None and not self._cursor.is_dirty:
            self._stream.text_arrived(self._cursor)  # type: ignore[union-attr]
        if not self._told or self._feeds_stream:
            self._told = True
            self._tell(ev.OutputArrived(self.task.name))

    def on_event(self, kind: str, event: stage_pb.TaskEvent) -> None:
        """Anything else."""
        self._events += 1
        name = self.task.name
        match kind:
            case "finished":
                self._tell(ev.Finished(name, event.finished))
            case "text":
                self._text(event.text)
            case "progress":
                self._progress(event.progress)
            case "media" | "audio_chunk" | "tensor":
                self._piece(kind, event)
            case "started":
                started = event.started
                waited, moved = started.engine_queue.ToNanoseconds(), started.transfer.ToNanoseconds()
                self._tell(ev.Started(name, waited / 1e9, moved / 1e9))
            case "input_taken":
                self._tell(ev.InputTaken(name, event.input_taken.chunks))
            case "failed":
                error = MeshError.from_status(event.failed)
                error.metadata.setdefault("replica", str(self.link.key))
                self._tell(ev.Failed(name, error))
            case "aborted":
                aborted = event.aborted
                self._tell(ev.Aborted(name, aborted.usage if aborted.HasField("usage") else None))

    def on_lost(self, error: MeshError) -> None:
        """The link broke."""
        self._tell(ev.Lost(self.task.name, error))

    def detach(self) -> None:
        """Listen no more; what still comes is dropped."""
        self._tell = _nobody
        self._stream = self._cursor = None

    def _text(self, delta: frame_pb.TextDelta) -> None:
        output = self._output
        if self._stream is not None and self._cursor is not None:
            self._stream.close_text(self._cursor)
        output.deltas.append(delta)
        if delta.index == 0:
            output.token_ids.extend(delta.token_ids)
            output.texts.append(delta.text)
        if self._cursor is not None:
            self._cursor.skip_to_end()
        self._frame(frame_pb.Frame(text=delta))
        self._grew()

    def _piece(self, kind: str, event: stage_pb.TaskEvent) -> None:
        frame = frame_pb.Frame(stage=self.task.name, replica_id=self.link.key.replica_id)
        getattr(frame, kind).CopyFrom(getattr(event, kind))
        self._output.pieces.append(frame)
        self._media += 1
        if self._media > self.task.skip_media:
            self._frame(for_client(frame), size=frame.ByteSize())
        self._grew()

    def _progress(self, progress: frame_pb.Progress) -> None:
        frame, size = frame_pb.Frame(progress=progress), len(progress.preview.data)
        if size and self._stream is not None and self._stream.pending_bytes + size > MAX_PREVIEW_BYTES:
            frame.progress.ClearField("preview")
            size = 0
        self._frame(frame, size)

    def _frame(self, frame: frame_pb.Frame, size: int = 0) -> None:
        """To the client, after the text that came before."""
        if self._stream is None:
            return
        if size and self._stream.pending_bytes + size > MAX_PENDING_BYTES:
            message = f"the client reads too slowly: {self._stream.pending_bytes} bytes wait for it"
            self._tell(ev.Stop(ev.StopCause.FAILED, MeshError(Reason.OVERLOADED, message)))
            return
        frame.stage = self.task.name
        frame.replica_id = self.link.key.replica_id
        if self._cursor is not None:
            self._stream.close_text(self._cursor)
        self._stream.add(frame, size)

    def _grew(self) -> None:
        self._told = True
        self._tell(ev.OutputArrived(self.task.name))


def _nobody(event: ev.Event) -> None:
    """The request is gone."""
