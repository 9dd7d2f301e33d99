"""The small calls of both clients."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stagemesh import AsyncClient, Client, InvalidRequest, Unreachable
from tests.unit.client.scripted_head import ScriptedHead, free_port, whole_answer

Head = Callable[..., ScriptedHead]


async def test_lists_follow_pages(head: Head) -> None:
    address = head(whole_answer).address
    with Client(address) as client:
        assert [pipeline.name for pipeline in client.list_pipelines()] == ["portraits", "shapes"]
    async with AsyncClient(address) as aio:
        assert [pipeline.name for pipeline in await aio.list_pipelines()] == ["portraits", "shapes"]


async def test_a_pipeline_comes_with_stages_defaults_and_problems(head: Head) -> None:
    address = head(whole_answer).address
    with Client(address) as client:
        pipeline = client.get_pipeline("shapes")
    async with AsyncClient(address) as aio:
        assert await aio.get_pipeline("shapes") == pipeline
    assert pipeline.problems == ("painter: no node serves it",)
    painter = pipeline.stage("painter")
    assert painter is not None and painter.inputs == ("writer",) and painter.is_output
    assert (painter.output_modality, painter.edge) == ("image", "whole")
    assert painter.default_sampling_params == {"num_inference_steps": 20}
    assert pipeline.stage_type("", 1) == "diffusion" and pipeline.stage_type("", 2) is None


async def test_abort_says_what_became_of_each(head: Head) -> None:
    address = head(whole_answer).address
    with Client(address) as client:
        results = client.abort("runs", "gone")
    async with AsyncClient(address) as aio:
        assert await aio.abort("runs", "gone") == results
    assert [(result.request_id, result.outcome) for result in results] == [("runs", "aborted"), ("gone", "unknown")]


async def test_abort_of_nothing_is_refused(head: Head) -> None:
    with Client(head(whole_answer).address) as client, pytest.raises(InvalidRequest, match="at least one"):
        client.abort()


def test_calls_without_a_head_name_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    with Client(address) as client, pytest.raises(Unreachable, match=address):
        client.get_pipeline()


def test_the_address_comes_from_the_environment_when_none_is_given(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    address = head(whole_answer).address
    monkeypatch.setenv("STAGEMESH_HEAD", address)
    with Client() as client:
        assert client.address == address and client.list_pipelines()
