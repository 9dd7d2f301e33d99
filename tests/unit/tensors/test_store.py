"""The store keeps within its bounds, and lets go by key, by request, by time and at its end."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.tensors import TensorStore, decode, segments
from stagemesh.v1 import tensor_pb2 as tensor_pb

LARGE = np.arange(1 << 15, dtype=np.float32)  # 128 KiB


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock):  # type: ignore[no-untyped-def]
    store = TensorStore(host_id="here", incarnation="one", max_bytes=1 << 20, max_tensors=6, ttl_s=60.0, clock=clock)
    yield store
    store.close()
    assert segments.names_of(os.getpid()) == []


def read_all(store: TensorStore, ref: tensor_pb.TensorRef) -> bytes:
    return bytes(store.read(ref.key, ref.owner_incarnation).data)


def test_small_goes_inline_and_large_by_reference(store: TensorStore) -> None:
    small = store.put("r", LARGE[: (64 << 10) // 4 - 1])
    large = store.put("r", LARGE[: (64 << 10) // 4])
    assert small.WhichOneof("value") == "inline"
    assert np.array_equal(decode(small.inline), LARGE[:16383])
    assert large.WhichOneof("value") == "ref"
    assert (large.ref.dtype, list(large.ref.shape), large.ref.size_bytes) == ("float32", [16384], 64 << 10)
    assert (large.ref.host_id, large.ref.owner_incarnation) == ("here", "one")
    assert large.ref.shared_memory in segments.names_of(os.getpid())


def test_an_empty_array_goes_inline_whatever_the_threshold() -> None:
    store = TensorStore(host_id="here", incarnation="one", inline_below_bytes=0)
    assert store.put("r", np.zeros((0, 3))).WhichOneof("value") == "inline"
    assert store.put("r", np.zeros(1, np.uint8)).WhichOneof("value") == "ref"
    store.close()


def test_the_caller_may_change_its_array_afterwards(store: TensorStore) -> None:
    array = LARGE.copy()
    ref = store.put("r", array).ref
    array[:] = 0
    assert read_all(store, ref) == LARGE.tobytes()


def test_bfloat16_bits_are_kept_under_their_own_name(store: TensorStore) -> None:
    ref = store.put("r", np.zeros((256, 256), np.uint16), dtype="bfloat16").ref
    assert (ref.dtype, list(ref.shape), ref.size_bytes) == ("bfloat16", [256, 256], 128 << 10)


def test_release_by_key_counts_what_was_there(store: TensorStore) -> None:
    keys = [store.put("r", LARGE).ref.key for _ in range(3)]
    assert store.release([keys[0], keys[0], "no-such-key"]) == (1, 1)
    assert (len(store), store.kept_bytes) == (2, 2 * LARGE.nbytes)
    assert len(segments.names_of(os.getpid())) == 2


def test_release_by_request_leaves_the_others(store: TensorStore) -> None:
    mine = store.put("mine", LARGE).ref
    other = store.put("other", LARGE).ref
    assert store.release_request("mine") == 1
    with pytest.raises(MeshError) as caught:
        read_all(store, mine)
    assert caught.value.reason is Reason.TENSOR_GONE
    assert read_all(store, other) == LARGE.tobytes()


def test_a_grace_lets_a_late_consumer_still_read(store: TensorStore, clock: Clock) -> None:
    ref = store.put("r", LARGE).ref
    assert store.release_request("r", grace_s=5.0) == 1
    clock.now += 4.9
    assert store.expire() == 0
    clock.now += 0.2
    assert store.expire() == 1
    with pytest.raises(MeshError):
        read_all(store, ref)


def test_what_nobody_released_goes_by_time_and_reading_renews_it(store: TensorStore, clock: Clock) -> None:
    unread, read = store.put("r", LARGE).ref, store.put("r", LARGE).ref
    clock.now += 59
    read_all(store, read)
    clock.now += 2
    assert store.expire() == 1
    assert read_all(store, read) == LARGE.tobytes()
    with pytest.raises(MeshError):
        read_all(store, unread)


def test_an_earlier_incarnations_reference_is_refused(store: TensorStore) -> None:
    ref = store.put("r", LARGE).ref
    with pytest.raises(MeshError) as caught:
        store.read(ref.key, "zero")
    assert caught.value.reason is Reason.STALE_INCARNATION


def test_bytes_are_bounded_and_a_refusal_says_the_limit(store: TensorStore) -> None:
    store.put("r", np.zeros(900 << 10, np.uint8))
    with pytest.raises(MeshError, match="1048576") as caught:
        store.put("r", np.zeros(200 << 10, np.uint8))
    assert caught.value.reason is Reason.OVERLOADED
    store.put("r", np.zeros(100 << 10, np.uint8))


def test_the_number_of_tensors_is_bounded(store: TensorStore) -> None:
    for _ in range(6):
        store.put("r", LARGE)
    with pytest.raises(MeshError, match="at most 6"):
        store.put("r", LARGE)


def test_expired_tensors_make_room_at_once(store: TensorStore, clock: Clock) -> None:
    store.put("r", np.zeros(900 << 10, np.uint8))
    clock.now += 61
    store.put("r", np.zeros(900 << 10, np.uint8))
    assert store.kept_bytes == 900 << 10


def test_without_room_in_shared_memory_it_is_kept_in_the_process(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(data: memoryview) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments, "create", full)
    ref = store.put("r", LARGE).ref
    assert ref.shared_memory == ""
    assert read_all(store, ref) == LARGE.tobytes()


def test_a_write_that_fails_in_the_middle_leaves_no_segment(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    real = os.write

    def sometimes(descriptor: int, data: memoryview) -> int:
        written.append(len(data))
        if len(written) == 2:
            raise OSError(errno.EIO, "broken")
        return real(descriptor, data[:1000])

    monkeypatch.setattr(os, "write", sometimes)
    with pytest.raises(OSError, match="broken"):
        store.put("r", LARGE)
    monkeypatch.undo()
    assert len(written) == 2
    assert (len(store), store.kept_bytes) == (0, 0)
    assert segments.names_of(os.getpid()) == []


def test_a_reader_reads_on_while_the_tensor_is_released(store: TensorStore) -> None:
    ref = store.put("r", LARGE).ref
    reader = store.read(ref.key)
    store.release([ref.key])
    assert bytes(reader.data) == LARGE.tobytes()


def test_a_closed_store_keeps_nothing_and_takes_nothing(store: TensorStore) -> None:
    store.put("r", LARGE)
    store.close()
    assert (len(store), store.kept_bytes) == (0, 0)
    with pytest.raises(MeshError) as caught:
        store.put("r", LARGE)
    assert caught.value.reason is Reason.DRAINING


def test_many_threads_put_and_release_without_losing_count() -> None:
    store = TensorStore(host_id="here", incarnation="one")

    def work(name: str) -> None:
        for _ in range(50):
            ref = store.put(name, LARGE).ref
            if int.from_bytes(os.urandom(1)) % 2:
                store.release([ref.key])
        store.release_request(name)

    threads = [threading.Thread(target=work, args=(f"r{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(store), store.kept_bytes) == (0, 0)
    assert segments.names_of(os.getpid()) == []
