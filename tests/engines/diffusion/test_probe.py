"""Pipelines that read pictures become READY: their self-probe brings what they read."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "worker" / "replica"))

from replica_harness import HeadLink, replicas, submit

pytestmark = [pytest.mark.engines, pytest.mark.timeout(200)]


def _picture(color: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), color).save(buffer, format="png")
    return buffer.getvalue()


async def _paint(link: HeadLink, slot: int, pictures: list[bytes]) -> bytes:
    task = submit(slot, "a red circle")
    task.params.diffusion.num_inference_steps = 4
    task.params.diffusion.seed = 1
    for data in pictures:
        task.prompt.media.add(modality="image", data=data)
    await link.send(submits=[task])
    ending = await link.end_of(slot)
    assert ending.HasField("finished"), ending
    return link.events(slot, "media")[0].media.data


@pytest.mark.parametrize(("kind", "pictures"), [("edit", 1), ("inpaint", 2)])
async def test_a_pipeline_that_wants_a_picture_is_probed_with_one_and_then_reads_those_of_its_requests(
    tiny: Callable[[str], Path], kind: str, pictures: int
) -> None:
    async with replicas() as start:
        replica = await start(engine="diffusion", stage_type="diffusion", model=str(tiny(kind)))
        await replica.ready(120)
        link = await replica.link()
        red, blue, again = [
            await _paint(link, slot, [_picture(color)] * pictures)
            for slot, color in enumerate(("red", "blue", "red"), 1)
        ]
        assert red == again != blue
        await link.close()
