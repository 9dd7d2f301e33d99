"""R16 at the head: media go to the stages that say they read them, and what nobody reads is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagemesh import AsyncClient
from stagemesh.rpc.errors import Reason
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import prompt_pb2 as prompt_pb
from tests.mesh.harness import PAINTER, WRITER, Call, Cluster, cluster

TEXT_ONLY = {**WRITER, "media_inputs": []}
EDITOR = {**PAINTER, "media_inputs": ["image"]}


def _ask(mesh: Cluster, *media: prompt_pb.MediaInput) -> Call:
    prompt = prompt_pb.Prompt(text="a wish", negative_text="a blur", media=media)
    return Call(mesh.stub.Generate(inference_pb.GenerateRequest(prompt=prompt), timeout=20))


async def test_R16_each_stage_gets_the_media_that_it_declares_and_no_others(tmp_path: Path) -> None:
    listener = {**WRITER, "media_inputs": ["audio"]}
    async with cluster(tmp_path, [listener, EDITOR]) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        call = _ask(
            mesh,
            prompt_pb.MediaInput(modality="image", data=b"a picture"),
            prompt_pb.MediaInput(modality="audio", data=b"a sound"),
            prompt_pb.MediaInput(modality="image", data=b"a mask", uuid="m"),
        )
        task = await writer.next_task()
        assert [item.data for item in task.submit.prompt.media] == [b"a sound"]
        assert (task.submit.prompt.text, task.submit.prompt.negative_text) == ("a wish", "a blur")
        task.tokens([1], "red")
        task.finish()
        picture = await painter.next_task()
        assert [item.data for item in picture.submit.prompt.media] == [b"a picture", b"a mask"]
        assert picture.submit.prompt.media[1].uuid == "m"
        picture.media(b"PNG")
        picture.finish()
        await call.rest()


async def test_R16_the_pipelines_description_says_which_stage_reads_what(tmp_path: Path) -> None:
    async with cluster(tmp_path, [TEXT_ONLY, EDITOR]) as mesh, AsyncClient(mesh.address) as client:
        stages = (await client.get_pipeline()).stages
        assert {stage.name: stage.media_inputs for stage in stages} == {"writer": (), "painter": ("image",)}


async def test_R16_media_that_no_stage_reads_are_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    async with cluster(tmp_path, [TEXT_ONLY, EDITOR]) as mesh:
        writer = await mesh.add("writer")
        error = await _ask(mesh, prompt_pb.MediaInput(modality="video", data=b"x")).error()
        assert (error.reason, error.metadata["field"]) == (Reason.INVALID_REQUEST, "prompt.media[0].modality")
        assert "writer reads none; painter reads image" in error.message
        assert not writer.has_arrivals


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://pictures.example/a.png", "stage 'painter' sets no engine_args.allowed_media_domains"),
        ("file:///etc/passwd", "stage 'painter' sets no engine_args.allowed_local_media_path"),
        ("ftp://pictures.example/a.png", "must be an http, https or file URL"),
    ],
)
async def test_a_url_is_refused_where_the_stage_that_reads_it_allows_none(
    tmp_path: Path, url: str, problem: str
) -> None:
    async with cluster(tmp_path, [TEXT_ONLY, EDITOR]) as mesh:
        error = await _ask(mesh, prompt_pb.MediaInput(modality="image", url=url)).error()
        assert (error.reason, error.metadata["field"]) == (Reason.INVALID_REQUEST, "prompt.media[0].url")
        assert problem in error.message
