"""Control calls: an allow-list, a bound on how many run at once, and results that are plain JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format, struct_pb2

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.wire import whole_numbers
from stagemesh_worker.engines.base import Engine

MAX_CALLS = 16
"""Control calls at once; they wait for the engine, never for each other."""


class ControlCalls:
    """Runs the allow-listed control methods of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = 0

    @property
    def methods(self) -> frozenset[str]:
        """Names that `call` takes."""
        return self._engine.call_methods

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> struct_pb2.Value:
        """Run one method.

        Raises:
            MeshError: METHOD_NOT_ALLOWED for an unknown name, INVALID_REQUEST for arguments it does not take,
                OVERLOADED, or what the engine raised.
        """
        if method not in self.methods:
            raise MeshError(
                Reason.METHOD_NOT_ALLOWED,
                f"method: {method!r}: this stage allows {', '.join(sorted(self.methods)) or 'none'}",
                method=method,
            )
        if self._running >= MAX_CALLS:
            raise MeshError(Reason.OVERLOADED, f"{MAX_CALLS} control calls are running", limit=MAX_CALLS)
        self._running += 1
        try:
            result = await self._engine.call(method, whole_numbers(args), whole_numbers(kwargs))
        except asyncio.CancelledError:
            raise
        except (TypeError, ValueError) as error:
            raise MeshError(Reason.INVALID_REQUEST, f"{method}: {error}", method=method) from error
        finally:
            self._running -= 1
        return _to_value(method, result)


def _to_value(method: str, result: Any) -> struct_pb2.Value:
    try:
        return json_format.Parse(json.dumps(result), struct_pb2.Value())
    except (TypeError, ValueError, json_format.ParseError) as error:
        raise MeshError(Reason.STAGE_FAILED, f"{method}: its result is not JSON: {error}", method=method) from error
