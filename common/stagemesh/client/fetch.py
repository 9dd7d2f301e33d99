"""The way of an output that stayed with its replica: what to ask for, what came, whether to go on. It does no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable

from stagemesh.client.decode import complete
from stagemesh.client.errors import RequestTimeout, StageMeshError, invalid, typed
from stagemesh.client.frames import Frame, Reference
from stagemesh.references import reference_in
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.tensors.received import Received, check_size
from stagemesh.v1 import inference_pb2 as inference_pb

MAX_ATTEMPTS = 4
"""Calls for one output; each goes on where the one before broke."""
BACKOFF_S = 0.2
"""Before the second call; doubled from one to the next."""


class Fetch:
    """One output, from the first call to its last byte."""

    def __init__(self, reference: Reference, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InvalidRequest."""
        if not timeout_s > 0:
            raise invalid("timeout", timeout_s, "want seconds, above 0")
        ref = reference_in(reference.message)
        if ref is None:
            raise invalid("reference", reference, "has no reference")
        try:
            check_size(ref)
        except MeshError as error:
            raise typed(error) from None
        self._reference = reference
        self._ref = ref
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._received = Received(ref, "the head")
        self._attempts = 0

    def next_call(self) -> tuple[inference_pb.FetchOutputRequest, float]:
        """The message to send now, and the call's timeout in seconds. Raises RequestTimeout."""
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            problem = f"the output did not come within {self._timeout_s:g} s"
            raise RequestTimeout(Reason.REQUEST_TIMEOUT, problem, timeout_s=self._timeout_s)
        self._attempts += 1
        return inference_pb.FetchOutputRequest(ref=self._ref, offset_bytes=self._received.size), remaining

    def accept(self, chunk: inference_pb.FetchOutputResponse) -> None:
        """The next bytes. Raises StageLost when there are more than the reference says."""
        try:
            self._received.add(chunk.data, chunk.crc32 if chunk.HasField("crc32") else None)
        except MeshError as error:
            raise typed(error) from None

    def delay_after(self, error: StageMeshError) -> float:
        """Seconds to wait before the next call; raises `error` when there is to be none."""
        delay = max(error.retry_delay_s or 0.0, float(BACKOFF_S * 2 ** (self._attempts - 1)))
        if not error.retryable or self._attempts >= MAX_ATTEMPTS or self._clock() + delay >= self._deadline:
            raise error
        return delay

    def result(self) -> Frame:
        """The frame that the reference stands for. Raises StageLost when its checksum is another."""
        try:
            self._received.check_end()
            return complete(self._reference, self._received.verified())
        except MeshError as error:
            raise typed(error) from None
