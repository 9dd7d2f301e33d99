"""The one catalogue of errors: reason -> status code, public text, whether and when to retry.

On every wire an error is a `google.rpc.Status` with one `ErrorInfo {reason, domain "stagemesh", metadata}` (AIP-193)
and, where waiting helps, a `RetryInfo`. Inside a process it is a `MeshError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from stagemesh.wire import duration

DOMAIN = "stagemesh"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARS = 2000  # headers above 8 KiB are refused by common proxies


class Reason(StrEnum):
    """Machine-readable reasons, as in `ErrorInfo.reason`."""

    INVALID_REQUEST = "INVALID_REQUEST"
    UNKNOWN_PIPELINE = "UNKNOWN_PIPELINE"
    UNKNOWN_STAGE = "UNKNOWN_STAGE"
    UNKNOWN_REPLICA = "UNKNOWN_REPLICA"
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
    PROMPT_TOO_LARGE = "PROMPT_TOO_LARGE"
    OVERLOADED = "OVERLOADED"
    NO_LIVE_REPLICA = "NO_LIVE_REPLICA"
    REPLICA_LOST = "REPLICA_LOST"
    STAGE_LOST = "STAGE_LOST"
    STAGE_FAILED = "STAGE_FAILED"
    ADAPTER_FAILED = "ADAPTER_FAILED"
    ENGINE_DEAD = "ENGINE_DEAD"
    ENGINE_STUCK = "ENGINE_STUCK"
    START_FAILED = "START_FAILED"
    BAD_STAGE_CONFIG = "BAD_STAGE_CONFIG"
    REQUEST_TIMEOUT = "REQUEST_TIMEOUT"
    REQUEST_ABORTED = "REQUEST_ABORTED"
    STALE_INCARNATION = "STALE_INCARNATION"
    NODE_UNKNOWN = "NODE_UNKNOWN"
    NODE_REFUSED = "NODE_REFUSED"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    REVISION_TOO_OLD = "REVISION_TOO_OLD"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    UNSUPPORTED = "UNSUPPORTED"
    TENSOR_GONE = "TENSOR_GONE"
    TENSOR_CORRUPT = "TENSOR_CORRUPT"
    DRAINING = "DRAINING"
    UNREACHABLE = "UNREACHABLE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """What the mesh says and does about one reason."""

    code: grpc.StatusCode
    text: str
    """Public sentence for people, used when the error brings none of its own."""
    retryable: bool = False
    retry_delay_s: float | None = None


_C = grpc.StatusCode
CATALOGUE: dict[Reason, ErrorKind] = {
    Reason.INVALID_REQUEST: ErrorKind(_C.INVALID_ARGUMENT, "the request is not valid"),
    Reason.UNKNOWN_PIPELINE: ErrorKind(_C.NOT_FOUND, "this head serves no such pipeline"),
    Reason.UNKNOWN_STAGE: ErrorKind(_C.NOT_FOUND, "the pipeline has no such stage"),
    Reason.UNKNOWN_REPLICA: ErrorKind(_C.NOT_FOUND, "there is no such replica"),
    Reason.DUPLICATE_REQUEST: ErrorKind(_C.ALREADY_EXISTS, "a request with this id is still running"),
    Reason.PROMPT_TOO_LARGE: ErrorKind(_C.INVALID_ARGUMENT, "the prompt is too large"),
    Reason.OVERLOADED: ErrorKind(_C.RESOURCE_EXHAUSTED, "the mesh is at its limit", True, 1.0),
    Reason.NO_LIVE_REPLICA: ErrorKind(_C.UNAVAILABLE, "no replica of the stage is ready", True, 2.0),
    Reason.REPLICA_LOST: ErrorKind(_C.UNAVAILABLE, "the replica was lost", True, 0.5),
    Reason.STAGE_LOST: ErrorKind(_C.DATA_LOSS, "the replica was lost after output had been delivered"),
    Reason.STAGE_FAILED: ErrorKind(_C.INTERNAL, "the stage failed on this request"),
    Reason.ADAPTER_FAILED: ErrorKind(_C.INTERNAL, "the stage could not read its input"),
    Reason.ENGINE_DEAD: ErrorKind(_C.UNAVAILABLE, "the engine of the replica died", True, 1.0),
    Reason.ENGINE_STUCK: ErrorKind(_C.UNAVAILABLE, "the engine of the replica makes no progress", True, 1.0),
    Reason.START_FAILED: ErrorKind(_C.FAILED_PRECONDITION, "the replica could not start"),
    Reason.BAD_STAGE_CONFIG: ErrorKind(_C.FAILED_PRECONDITION, "the engine refuses the stage's configuration"),
    Reason.REQUEST_TIMEOUT: ErrorKind(_C.DEADLINE_EXCEEDED, "the request ran out of time"),
    Reason.REQUEST_ABORTED: ErrorKind(_C.CANCELLED, "the request was aborted"),
    Reason.STALE_INCARNATION: ErrorKind(_C.FAILED_PRECONDITION, "the message belongs to an earlier start"),
    Reason.NODE_UNKNOWN: ErrorKind(_C.NOT_FOUND, "the session is unknown: join again", True, 0.2),
    Reason.NODE_REFUSED: ErrorKind(_C.FAILED_PRECONDITION, "the node cannot join"),
    Reason.VERSION_MISMATCH: ErrorKind(_C.FAILED_PRECONDITION, "the versions do not fit"),
    Reason.REVISION_TOO_OLD: ErrorKind(_C.OUT_OF_RANGE, "that revision is no longer kept: start anew"),
    Reason.METHOD_NOT_ALLOWED: ErrorKind(_C.PERMISSION_DENIED, "the method is not on the allow-list"),
    Reason.UNSUPPORTED: ErrorKind(_C.UNIMPLEMENTED, "the stage cannot do this"),
    Reason.TENSOR_GONE: ErrorKind(_C.NOT_FOUND, "the tensor is no longer kept"),
    Reason.TENSOR_CORRUPT: ErrorKind(_C.DATA_LOSS, "the tensor's bytes do not fit its checksum"),
    Reason.DRAINING: ErrorKind(_C.UNAVAILABLE, "it takes no new work because it drains", True, 1.0),
    Reason.UNREACHABLE: ErrorKind(_C.UNAVAILABLE, "the peer cannot be reached", True, 1.0),
    Reason.UNAUTHENTICATED: ErrorKind(_C.UNAUTHENTICATED, "a valid token or certificate is needed"),
    Reason.PERMISSION_DENIED: ErrorKind(_C.PERMISSION_DENIED, "the caller's role may not do this"),
    Reason.INTERNAL: ErrorKind(_C.INTERNAL, "an error inside the mesh"),
}
"""Every reason has its row; a test walks it."""

_CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_FALLBACK: dict[grpc.StatusCode, Reason] = {
    _C.INVALID_ARGUMENT: Reason.INVALID_REQUEST,
    _C.UNAVAILABLE: Reason.UNREACHABLE,
    # A call that ends CANCELLED though nobody here cancelled it met a peer that stops.
    _C.CANCELLED: Reason.UNREACHABLE,
    _C.DEADLINE_EXCEEDED: Reason.REQUEST_TIMEOUT,
    _C.RESOURCE_EXHAUSTED: Reason.OVERLOADED,
    _C.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    _C.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
    _C.UNIMPLEMENTED: Reason.UNSUPPORTED,
}


class MeshError(Exception):
    """An error of the catalogue.

    `metadata` names every changing part of the message (field, stage, replica, limit), as strings.
    """

    def __init__(
        self,
        reason: Reason,
        message: str | None = None,
        *,
        retry_delay_s: float | None = None,
        **metadata: object,
    ) -> None:
        self.reason = reason
        self.kind = CATALOGUE[reason]
        self.message = _sendable(message or self.kind.text)
        self.retry_delay_s = retry_delay_s if retry_delay_s is not None else self.kind.retry_delay_s
        self.metadata = {key: _sendable(str(value)) for key, value in metadata.items()}
        super().__init__(self.message)

    @property
    def code(self) -> grpc.StatusCode:
        """gRPC status code of the reason."""
        return self.kind.code

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed when it is sent again."""
        return self.kind.retryable

    def to_status(self) -> status_pb2.Status:
        """The error as it goes over a wire."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        info = error_details_pb2.ErrorInfo(reason=self.reason.value, domain=DOMAIN, metadata=self.metadata)
        _pack(status, info)
        if self.retryable and self.retry_delay_s is not None:
            _pack(status, error_details_pb2.RetryInfo(retry_delay=duration(self.retry_delay_s)))
        return status

    @classmethod
    def from_status(cls, status: status_pb2.Status) -> MeshError:
        """The error behind a `google.rpc.Status`, ours or a stranger's."""
        code = _CODE_BY_NUMBER.get(status.code, _C.UNKNOWN)
        reason, metadata, delay = _FALLBACK.get(code, Reason.INTERNAL), {}, None
        for detail in status.details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                metadata = dict(info.metadata)
                reason = Reason(info.reason) if info.reason in Reason.__members__ else Reason.INTERNAL
            elif detail.Unpack(retry):
                delay = retry.retry_delay.ToNanoseconds() / 1e9
        error = cls(reason, status.message, retry_delay_s=delay)
        error.metadata = metadata
        return error

    @classmethod
    def from_rpc_error(cls, error: grpc.RpcError) -> MeshError:
        """The error behind a failed call, sync or aio."""
        if isinstance(error, grpc.aio.AioRpcError):
            code, details, trailers = error.code(), error.details(), error.trailing_metadata()
        else:
            call: grpc.Call = error  # type: ignore[assignment]
            code, details, trailers = call.code(), call.details(), call.trailing_metadata()
        for key, value in trailers or ():
            if key == DETAILS_KEY:
                return cls.from_status(status_pb2.Status.FromString(value))  # type: ignore[arg-type]
        return cls.from_status(status_pb2.Status(code=code.value[0], message=details or code.name))

    @classmethod
    def from_exception(cls, error: BaseException) -> MeshError:
        """Any exception as an error of the catalogue; strangers become INTERNAL and name their type only."""
        if isinstance(error, MeshError):
            return error
        if isinstance(error, grpc.RpcError):
            return cls.from_rpc_error(error)
        return cls(Reason.INTERNAL, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    async def abort(self, context: grpc.aio.ServicerContext) -> NoReturn:  # type: ignore[type-arg]
        """End the call of `context` with this error."""
        status = self.to_status()
        await context.abort(self.code, self.message, ((DETAILS_KEY, status.SerializeToString()),))
        raise AssertionError("context.abort returned")


def invalid(field: str, value: object, problem: str) -> MeshError:
    """INVALID_ARGUMENT that names the field, what was given and what would be right."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return MeshError(Reason.INVALID_REQUEST, f"{field}: {shown}: {problem}", field=field, value=shown)


def _sendable(text: str) -> str:
    """As UTF-8 can have it: a file's name in an OSError may hold half a surrogate pair, and its error must arrive."""
    return text.encode("utf-8", "backslashreplace").decode()[:MAX_MESSAGE_CHARS]


def _pack(status: status_pb2.Status, detail: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
