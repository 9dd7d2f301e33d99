"""What a client call raises.

    StageMeshError                 everything below; `reason`, `metadata`, `retryable`, `retry_delay_s`
    ├── InvalidRequest             a field of the request is wrong; `field` names it
    ├── NotFound                   no such pipeline, stage, replica or node
    ├── AlreadyRunning             a request with this id still runs
    ├── Unsupported                the stage cannot do what was asked
    ├── AccessDenied               no token, a wrong one, or one whose role may not do this
    ├── Overloaded                 the mesh is at its limit; `retry_after_s`
    ├── Unavailable                nobody can serve it now; `retry_after_s`
    │   └── Unreachable            the head cannot be reached
    ├── RequestTimeout             the deadline passed
    ├── RequestAborted             somebody aborted the request
    ├── StageLost                  a replica was lost after output had been delivered
    ├── StageFailed                a stage failed on this request
    ├── StartFailed                a stage, or the mesh, could not start; `details` has its own last lines
    └── InternalError              an error inside the mesh

Each is a `MeshError` of the one catalogue (`stagemesh.rpc.errors`), told apart by its reason.
"""

from __future__ import annotations

import grpc

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.errors import invalid as rpc_invalid


class StageMeshError(MeshError):
    """An error of a client call."""


class InvalidRequest(StageMeshError):
    """A field of the request is wrong. Nothing was submitted anywhere."""

    @property
    def field(self) -> str | None:
        """The field at fault, such as `sampling[painter].num_inference_steps`."""
        return self.metadata.get("field")


class NotFound(StageMeshError):
    """There is no such pipeline, stage, replica or node."""


class AlreadyRunning(StageMeshError):
    """A request with this id still runs."""


class Unsupported(StageMeshError):
    """The stage cannot do what was asked."""


class AccessDenied(StageMeshError):
    """No token, a wrong one, or one whose role may not do this."""


class _Later(StageMeshError):
    @property
    def retry_after_s(self) -> float:
        """Seconds after which another try makes sense."""
        return self.retry_delay_s or 0.0


class Overloaded(_Later):
    """The mesh is at its limit."""


class Unavailable(_Later):
    """Nobody can serve the request now."""


class Unreachable(Unavailable):
    """The head cannot be reached."""


class RequestTimeout(StageMeshError):
    """The deadline passed."""


class RequestAborted(StageMeshError):
    """Somebody aborted the request."""


class StageLost(StageMeshError):
    """A replica was lost after output had been delivered, and the request cannot go on exactly."""


class StageFailed(StageMeshError):
    """A stage failed on this request."""


class StartFailed(StageMeshError):
    """A stage, or the mesh itself, could not start."""

    details: tuple[str, ...] = ()
    """Last lines of who failed, oldest first."""


class InternalError(StageMeshError):
    """An error inside the mesh."""


_R = Reason
CLASS_OF: dict[Reason, type[StageMeshError]] = {
    _R.INVALID_REQUEST: InvalidRequest,
    _R.UNKNOWN_PIPELINE: NotFound,
    _R.UNKNOWN_STAGE: NotFound,
    _R.UNKNOWN_REPLICA: NotFound,
    _R.DUPLICATE_REQUEST: AlreadyRunning,
    _R.PROMPT_TOO_LARGE: InvalidRequest,
    _R.OVERLOADED: Overloaded,
    _R.NO_LIVE_REPLICA: Unavailable,
    _R.REPLICA_LOST: Unavailable,
    _R.STAGE_LOST: StageLost,
    _R.STAGE_FAILED: StageFailed,
    _R.ADAPTER_FAILED: StageFailed,
    _R.ENGINE_DEAD: Unavailable,
    _R.ENGINE_STUCK: Unavailable,
    _R.START_FAILED: StartFailed,
    _R.BAD_STAGE_CONFIG: StartFailed,
    _R.REQUEST_TIMEOUT: RequestTimeout,
    _R.REQUEST_ABORTED: RequestAborted,
    _R.STALE_INCARNATION: InternalError,
    _R.NODE_UNKNOWN: NotFound,
    _R.NODE_REFUSED: InternalError,
    _R.VERSION_MISMATCH: InternalError,
    _R.REVISION_TOO_OLD: InternalError,
    _R.METHOD_NOT_ALLOWED: AccessDenied,
    _R.UNSUPPORTED: Unsupported,
    _R.TENSOR_GONE: NotFound,
    _R.TENSOR_CORRUPT: StageLost,
    _R.DRAINING: Unavailable,
    _R.UNREACHABLE: Unreachable,
    _R.UNAUTHENTICATED: AccessDenied,
    _R.PERMISSION_DENIED: AccessDenied,
    _R.INTERNAL: InternalError,
}
"""Every reason has its class; a test walks it."""


def typed(error: MeshError) -> StageMeshError:
    """The same error as the class of its reason."""
    if isinstance(error, StageMeshError):
        return error
    result = CLASS_OF[error.reason](error.reason, error.message, retry_delay_s=error.retry_delay_s)
    result.metadata = dict(error.metadata)
    return result


def from_call(error: grpc.RpcError, address: str) -> StageMeshError:
    """The typed error behind a failed call to the head at `address`."""
    result = typed(MeshError.from_rpc_error(error))
    if isinstance(result, Unreachable):
        # gRPC's own text speaks of sockets and file descriptors; people need the address, and what to look at.
        why = next((words for sign, words in _CAUSES.items() if sign in result.message), "")
        result = Unreachable(
            _R.UNREACHABLE, f"no head answers at {address}{why and ': '}{why}", address=address, cause=result.message
        )
    return result


def closed_here() -> StageMeshError:
    """The error of a call on a client that its own program has closed."""
    return RequestAborted(_R.REQUEST_ABORTED, "this client was closed")


_CAUSES = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of an authority that this client trusts",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "Peer name": "its certificate is for another name",
    "Socket closed": "it closed the connection; it may want TLS, or a client certificate",
    "lookup": "the name cannot be resolved",
}
"""What gRPC says -> what it means."""


def invalid(field: str, value: object, problem: str) -> InvalidRequest:
    """An `InvalidRequest` found before anything was sent."""
    error = rpc_invalid(field, value, problem)
    return InvalidRequest(error.reason, error.message, field=field, value=error.metadata["value"])
