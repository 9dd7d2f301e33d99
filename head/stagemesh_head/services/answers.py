"""Orders that may be sent twice: the same request id again gives the same answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from stagemesh.rpc.errors import invalid

KEPT, KEPT_S, MAX_ID_CHARS = 1_000, 600.0, 128
Request = TypeVar("Request", bound=Any)
Response = TypeVar("Response")


class Answers:
    """The last answers to orders, by kind of order and request id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], tuple[float, bytes, Any]] = OrderedDict()

    def once(self, request: Request, work: Callable[[Request], Response]) -> Response:
        """Do `work`, or answer as before. An order that failed may be tried again; one without an id always is done.

        Raises:
            MeshError: INVALID_REQUEST when the id was given to another order; whatever `work` raises.
        """
        if not request.request_id:
            return work(request)
        if len(request.request_id) > MAX_ID_CHARS:
            raise invalid("request_id", request.request_id, f"has more than {MAX_ID_CHARS} characters")
        name = (type(request).__name__, request.request_id)
        text = request.SerializeToString(deterministic=True)
        self._forget()
        if name in self._kept:
            _, before, answer = self._kept[name]
            if before != text:
                raise invalid("request_id", request.request_id, "was given to another order")
            known: Response = answer
            return known
        response = work(request)
        self._kept[name] = (self._clock(), text, response)
        return response

    def _forget(self) -> None:
        now = self._clock()
        while self._kept and (len(self._kept) >= KEPT or now - next(iter(self._kept.values()))[0] > KEPT_S):
            self._kept.popitem(last=False)
