"""Messages between engine and child survive the wire; junk is refused without harm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh_worker.engines.diffusion import protocol as p

ITEM = p.Item(3, "a red circle", None, (1, -(1 << 63), (1 << 63) - 1), 2)

MESSAGES = [
    p.Run((ITEM,), {"num_inference_steps": 5, "guidance_scale": 2.5}, lora="ink", lora_scale=0.5),
    p.Abort(3),
    p.Call(1, "add_lora", {"name": "ink"}),
    p.Ready({"class_name": "StableDiffusionPipeline", "arguments": {"eta": "float"}}),
    p.Failed("no such folder", True),
    p.Step((3, 4), 2, 20),
    p.Output(3, 0, -1, "image"),
    p.ItemEnded(3, "invalid", 0, "must be divisible by 8", "height"),
    p.JobEnded(),
    p.Result(1, value=["ink"]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.type)
def test_every_message_comes_back_as_it_was(message: p.Message) -> None:
    assert p.decode([bytes(frame) for frame in p.encode(message)]) == message


def test_every_message_is_tried_above() -> None:
    assert {message.type for message in MESSAGES} == {kind.type for kind in p.Message.__subclasses__()}


def test_arrays_travel_as_raw_frames_without_a_copy() -> None:
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    latents = np.ones((1, 4, 2, 2), np.float32)
    frames = p.encode(p.Output(1, 0, 7, "image", arrays={"output": picture, "other": latents}))
    assert len(frames) == 3
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), picture)
    back = p.decode([bytes(frame) for frame in frames])
    assert isinstance(back, p.Output)
    assert np.array_equal(back.arrays["output"], picture)
    assert np.array_equal(back.arrays["other"], latents)
    assert not back.arrays["output"].flags.writeable


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=3))
def test_junk_is_no_message(frames: list[bytes]) -> None:
    with pytest.raises(p.ProtocolError):
        p.decode(frames)


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[]",
        b'{"type": "pickle"}',
        b'{"type": "abort"}',
        b'{"type": "abort", "item": 1, "more": 2}',
        b'{"type": "step", "items": [1], "step": 1, "total": 2, "arrays": [["a", "<f4", [2]]]}',
    ],
)
def test_a_header_that_is_no_message_is_refused(header: bytes) -> None:
    with pytest.raises(p.ProtocolError):
        p.decode([header])


def test_a_frame_of_the_wrong_length_is_refused() -> None:
    header = b'{"type": "step", "items": [1], "step": 1, "total": 2, "arrays": [["a", "<f4", [2]]]}'
    with pytest.raises(p.ProtocolError):
        p.decode([header, b"12345"])
