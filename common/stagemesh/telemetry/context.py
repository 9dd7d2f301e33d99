"""W3C trace context as the mesh passes it on: two headers, checked once where they come in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS = 512
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of another process; empty when there is none."""

    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def read(cls, headers: Iterable[tuple[str, object]]) -> TraceContext:
        """The context of a call's metadata. Headers that are none are passed over, as the standard wants it."""
        found = {key: value for key, value in headers if key in (TRACEPARENT, TRACESTATE)}
        parent, state = str(found.get(TRACEPARENT, "")), str(found.get(TRACESTATE, ""))
        if not _PARENT.fullmatch(parent):
            return NO_TRACE
        return cls(parent, state if len(state) <= MAX_STATE_CHARS else "")

    def headers(self) -> dict[str, str]:
        """As headers, for whoever goes on with it; empty when there is none."""
        given = {TRACEPARENT: self.traceparent, TRACESTATE: self.tracestate}
        return {key: value for key, value in given.items() if value} if self.traceparent else {}


NO_TRACE = TraceContext()
