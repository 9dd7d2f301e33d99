"""What a producer keeps for its consumers: tensors in shared memory, each for a bounded time, all in bounded space."""

from __future__ import annotations

import asyncio
import errno
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.tensors import segments
from stagemesh.tensors.checksum import crc32
from stagemesh.tensors.codec import Array, as_bytes, prepare
from stagemesh.v1 import tensor_pb2 as tensor_pb

INLINE_BELOW_BYTES = 64 << 10
"""Smaller tensors go inside the message: a reference costs a round trip or a mapping (64 KiB)."""
MAX_BYTES = 2 << 30
"""Of all tensors kept (2 GiB)."""
MAX_TENSORS = 4096
TTL_S = 600.0
"""A tensor that nobody read or released for so long is dropped: its request's end was lost."""
ON_LOOP_BELOW_BYTES = 1 << 20
"""Copying less than this (1 MiB) costs the event loop less than a thread would."""

_NO_SHARED_MEMORY = {errno.ENOSPC, errno.ENOMEM, errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOTDIR}


@dataclass(slots=True)
class _Kept:
    request_id: str
    size: int
    segment: str
    """Name of the shared-memory segment; empty: in `data`."""
    data: bytes
    expires: float
    crc32: int | None = None


class TensorReader:
    """One tensor, open for reading also while it is released."""

    def __init__(self, kept: _Kept) -> None:
        self.size = kept.size
        self._kept = kept
        self.data = memoryview(segments.map_read_only(kept.segment, kept.size) if kept.segment else kept.data)
        """All its bytes."""

    @property
    def known_crc32(self) -> int | None:
        """CRC-32 of all bytes, when somebody has computed it."""
        return self._kept.crc32

    def remember_crc32(self, value: int) -> None:
        """Keep the CRC-32 of all bytes."""
        self._kept.crc32 = value

    def compute_crc32(self) -> int:
        """CRC-32 of all bytes; reads them once, for a thread when they are many."""
        self._kept.crc32 = crc32(self.data)
        return self._kept.crc32


class TensorStore:
    """Tensors of one replica. Its methods may be called from any thread.

    Args:
        host_id: identity of this host, for consumers that may map instead of fetch; empty: nobody may.
        incarnation: of the owner; references of another are refused.
        inline_below_bytes: smaller tensors go inline.
    """

    def __init__(
        self,
        *,
        host_id: str,
        incarnation: str,
        inline_below_bytes: int = INLINE_BELOW_BYTES,
        max_bytes: int = MAX_BYTES,
        max_tensors: int = MAX_TENSORS,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = ""
        """host:port where the owner serves TensorService; known once it listens."""
        self.incarnation = incarnation
        self._host_id = host_id
        self._inline_below = inline_below_bytes
        self._max_bytes = max_bytes
        self._max_tensors = max_tensors
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._bytes = 0
        self._closed = False

    @property
    def kept_bytes(self) -> int:
        """Bytes of all tensors kept."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, request_id: str, array: Array, *, dtype: str | None = None) -> tensor_pb.TensorValue:
        """Keep an array for a request, or put it inline when it is small.

        The array is copied: the caller may change it afterwards. Takes about 0.4 s a gigabyte; see `put_async`.

        Args:
            dtype: "bfloat16" when `array` holds its bits as uint16.

        Raises:
            MeshError: OVERLOADED when there is no room; INVALID_REQUEST when the type has no place on the wire.
        """
        stored, name = prepare(array, dtype)
        if stored.nbytes < self._inline_below or not stored.nbytes:
            inline = tensor_pb.Tensor(dtype=name, shape=stored.shape, data=stored.tobytes())
            return tensor_pb.TensorValue(inline=inline)
        size = stored.nbytes
        self._reserve(size)
        try:
            segment, data = self._keep(as_bytes(stored))
        except BaseException:
            with self._lock:
                self._bytes -= size
            raise
        key = secrets.token_urlsafe(16)
        with self._lock:
            closed = self._closed
            if not closed:
                self._kept[key] = _Kept(request_id, size, segment, data, self._clock() + self._ttl_s)
        if closed:
            if segment:
                segments.remove(segment)
            raise MeshError(Reason.DRAINING, "the tensor store is closed")
        return tensor_pb.TensorValue(
            ref=tensor_pb.TensorRef(
                endpoint=self.endpoint,
                key=key,
                dtype=name,
                shape=stored.shape,
                size_bytes=size,
                host_id=self._host_id,
                shared_memory=segment,
                owner_incarnation=self.incarnation,
            )
        )

    async def put_async(self, request_id: str, array: Array, *, dtype: str | None = None) -> tensor_pb.TensorValue:
        """As `put`, with large arrays copied off the event loop; do not change the array meanwhile."""
        if array.nbytes < ON_LOOP_BELOW_BYTES:
            return self.put(request_id, array, dtype=dtype)
        return await asyncio.to_thread(self.put, request_id, array, dtype=dtype)

    def read(self, key: str, incarnation: str = "") -> TensorReader:
        """Open a tensor for reading; its time starts anew.

        Raises:
            MeshError: TENSOR_GONE, or STALE_INCARNATION when the caller means an earlier owner.
        """
        if incarnation and incarnation != self.incarnation:
            raise MeshError(Reason.STALE_INCARNATION, "the tensor's owner was restarted", key=key)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                kept.expires = self._clock() + self._ttl_s
        try:
            reader = TensorReader(kept) if kept is not None else None
        except FileNotFoundError:  # released a moment ago
            reader = None
        if reader is None:
            raise MeshError(Reason.TENSOR_GONE, f"tensor {key!r} was released or its time is over", key=key)
        return reader

    def release(self, keys: Iterable[str]) -> tuple[int, int]:
        """Drop tensors; returns how many were dropped and how many were not there."""
        wanted = list(dict.fromkeys(keys))
        with self._lock:
            dropped = [kept for key in wanted if (kept := self._kept.pop(key, None)) is not None]
        self._forget(dropped)
        return len(dropped), len(wanted) - len(dropped)

    def release_request(self, request_id: str, grace_s: float = 0.0) -> int:
        """Drop what was kept for a request, or let it live `grace_s` more; returns how many."""
        with self._lock:
            keys = [key for key, kept in self._kept.items() if kept.request_id == request_id]
            if grace_s > 0:
                for key in keys:
                    self._kept[key].expires = min(self._kept[key].expires, self._clock() + grace_s)
        if grace_s <= 0:
            self.release(keys)
        return len(keys)

    def expire(self) -> int:
        """Drop what nobody read or released in time; returns how many."""
        now = self._clock()
        with self._lock:
            keys = [key for key, kept in self._kept.items() if kept.expires <= now]
        return self.release(keys)[0]

    async def expire_forever(self, interval_s: float = 10.0) -> None:
        """Drop what is over, every `interval_s`; for a task that the owner cancels."""
        while True:
            await asyncio.sleep(interval_s)
            self.expire()

    def close(self) -> None:
        """Drop everything and keep nothing new; also twice."""
        with self._lock:
            self._closed = True
            dropped = list(self._kept.values())
            self._kept.clear()
        self._forget(dropped)

    def _reserve(self, size: int) -> None:
        for attempt in (1, 2):
            with self._lock:
                if self._closed:
                    raise MeshError(Reason.DRAINING, "the tensor store is closed")
                if self._bytes + size <= self._max_bytes and len(self._kept) < self._max_tensors:
                    self._bytes += size
                    return
            if attempt == 1:
                self.expire()
        raise MeshError(
            Reason.OVERLOADED,
            f"no room for a tensor of {size} bytes: {len(self._kept)} tensors of {self._bytes} bytes are kept, "
            f"at most {self._max_tensors} of {self._max_bytes}",
            limit_bytes=self._max_bytes,
        )

    def _keep(self, data: memoryview) -> tuple[str, bytes]:
        try:
            return segments.create(data), b""
        except OSError as error:
            if error.errno not in _NO_SHARED_MEMORY:
                raise
            # A container's /dev/shm is often 64 MB: what does not fit is served by FetchTensor alone.
            return "", bytes(data)

    def _forget(self, dropped: list[_Kept]) -> None:
        for kept in dropped:
            if kept.segment:
                segments.remove(kept.segment)
        with self._lock:
            self._bytes -= sum(kept.size for kept in dropped)
