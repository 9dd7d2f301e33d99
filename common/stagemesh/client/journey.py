"""A request's way through one or several calls: what to send, what came, whether to go on. It does no I/O.

A call that fails before anything came is sent again when the mesh says that waiting helps. A stream that breaks later
is taken up by request id, with what the client has already (`ResumePoint`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stagemesh.client.decode import decode
from stagemesh.client.errors import (
    AlreadyRunning,
    InternalError,
    Overloaded,
    RequestTimeout,
    StageMeshError,
    Unavailable,
    Unreachable,
)
from stagemesh.client.frames import Finished, Frame, Media, Reference, StageFinished, TextDelta
from stagemesh.rpc.errors import Reason
from stagemesh.v1 import inference_pb2 as inference_pb

Response = inference_pb.GenerateResponse | inference_pb.GenerateInteractiveResponse
BACKOFF_BASE_S, BACKOFF_CAP_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How hard a client tries."""

    max_retries: int = 3
    """Further tries of a call that nothing came of; 0: none."""
    resume_window_s: float = 30.0
    """How long to try to take up a broken stream, from its last frame; 0: never. It covers a restart of the head."""


@dataclass(slots=True)
class _StageSoFar:
    """What came of one stage."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    media: set[int] = field(default_factory=set)
    is_finished: bool = False


class Journey:
    """One request, from its first call to its end."""

    def __init__(
        self,
        request: inference_pb.GenerateRequest,
        *,
        timeout_s: float,
        policy: RetryPolicy,
        clock: Callable[[], float],
        jitter: Callable[[], float] = random.random,
        keeps_references: bool = False,
        trace_headers: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self._policy = policy
        self._clock = clock
        self._jitter = jitter
        self._deadline = clock() + timeout_s
        self._stages: dict[str, _StageSoFar] = {}
        self._sequence = 0
        self._has_several_completions = False
        self._last_frame_at = 0.0
        self._was_cut = False
        self._retries = 0
        self._resumes_in_a_row = 0
        self.is_finished = False
        self.keeps_references = keeps_references
        """Outputs that stayed with their replicas are left there."""
        self.trace_headers = trace_headers
        """The caller's own; None: it gave none."""

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._request.request_id

    @property
    def time_left_s(self) -> float:
        """Seconds until the request's deadline. Raises RequestTimeout when it has passed."""
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise self._timed_out()
        return remaining

    def next_call(self) -> tuple[inference_pb.GenerateRequest, float]:
        """The message to send now, and the call's timeout in seconds. Raises RequestTimeout."""
        remaining = self.time_left_s
        if self._sequence:
            self._request.resume.CopyFrom(self._resume_point())
        return self._request, remaining

    def accept(self, response: Response) -> Frame | None:
        """Take note of a response; returns its frame, or None for one that had come before the stream broke."""
        frame = decode(response)
        self._sequence = max(self._sequence, frame.sequence)
        self._last_frame_at = self._clock()
        self._resumes_in_a_row = 0
        if isinstance(frame, Finished):
            self.is_finished = True
            return frame
        stage = self._stages.setdefault(frame.stage, _StageSoFar())
        if isinstance(frame, TextDelta):
            if frame.index:
                self._has_several_completions = True
            else:
                stage.token_ids.extend(frame.token_ids)
                stage.text.append(frame.text)
        elif isinstance(frame, Media) or (isinstance(frame, Reference) and frame.message.HasField("media")):
            if frame.index in stage.media:
                return None
            stage.media.add(frame.index)
        elif isinstance(frame, StageFinished):
            if stage.is_finished:
                return None
            stage.is_finished = True
        return frame

    def ended_early(self) -> StageMeshError:
        """The error of a stream that ended well but without its last message."""
        return InternalError(Reason.INTERNAL, "the head closed the stream without saying how the request ended")

    def delay_after(self, error: StageMeshError) -> float:
        """Seconds to wait before the next call; raises `error` when there is to be none."""
        if isinstance(error, RequestTimeout) and self._clock() >= self._deadline:
            raise self._timed_out() from error
        delay = self._resume_delay(error) if self._sequence else self._retry_delay(error)
        if delay is None or self._clock() + delay >= self._deadline:
            raise error
        self._was_cut = self._was_cut or isinstance(error, Unreachable)
        return delay

    def _retry_delay(self, error: StageMeshError) -> float | None:
        # After a cut the head may not have noticed that its client is gone: then the id still runs for a moment.
        is_own_shadow = self._was_cut and isinstance(error, AlreadyRunning)
        if not (error.retryable or is_own_shadow) or self._retries >= self._policy.max_retries:
            return None
        self._retries += 1
        return max(error.retry_delay_s or 0.0, BACKOFF_BASE_S) * (1 + self._jitter() / 4)

    def _resume_delay(self, error: StageMeshError) -> float | None:
        may_heal = isinstance(error, Unreachable) or (
            self._was_cut and isinstance(error, AlreadyRunning | Unavailable | Overloaded)
        )
        if not may_heal or self._has_several_completions:
            return None
        if self._clock() - self._last_frame_at >= self._policy.resume_window_s:
            return None
        self._resumes_in_a_row += 1
        ceiling = min(BACKOFF_CAP_S, BACKOFF_BASE_S * float(2 ** min(self._resumes_in_a_row, 10)))
        return max(self._jitter() * ceiling, BACKOFF_BASE_S / 2)

    def _resume_point(self) -> inference_pb.ResumePoint:
        return inference_pb.ResumePoint(
            sequence=self._sequence,
            stages=[
                inference_pb.StageResume(
                    stage=name,
                    token_ids=stage.token_ids,
                    text="".join(stage.text),
                    finished=stage.is_finished,
                )
                for name, stage in self._stages.items()
            ],
        )

    def _timed_out(self) -> RequestTimeout:
        return RequestTimeout(
            Reason.REQUEST_TIMEOUT, f"the request did not end within {self._timeout_s:g} s", timeout_s=self._timeout_s
        )
