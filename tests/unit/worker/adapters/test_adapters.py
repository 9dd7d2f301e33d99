"""How a stage reads the outputs of the stages before it."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_worker.adapters import AdapterRunner, EngineInput, StageInput
from stagemesh_worker.engines.base import EngineConfigError

REQUEST = EngineInput(text="a red circle", negative_text="blurry")
CAPTION = StageInput("writer", text="a bold red circle")


def _stage(**fields: object) -> Stage:
    return Stage.model_validate({"name": "painter", "stage_type": "llm", "model": "m"} | fields)


async def _adapt(stage: Stage, request: EngineInput = REQUEST, *inputs: StageInput) -> EngineInput | None:
    runner = AdapterRunner(stage, timeout_s=1.0)
    try:
        return await runner.for_task()(request, inputs)
    finally:
        runner.close()


async def _refusal(stage: Stage, *inputs: StageInput) -> MeshError:
    with pytest.raises(MeshError) as caught:
        await _adapt(stage, REQUEST, *inputs)
    assert caught.value.reason == Reason.ADAPTER_FAILED
    return caught.value


async def test_first_stage_gets_the_prompt_as_it_is() -> None:
    assert await _adapt(_stage()) is REQUEST


async def test_text_becomes_the_prompt() -> None:
    made = await _adapt(_stage(input_adapter="text"), REQUEST, CAPTION, StageInput("other", text=" twice"))
    assert made is not None and made.text == "a bold red circle twice"


async def test_template_may_name_text_prompt_and_stages() -> None:
    stage = _stage(input_adapter="text", adapter_args={"template": "{prompt} | {text} | {writer}"})
    made = await _adapt(stage, REQUEST, CAPTION)
    assert made is not None and made.text == "a red circle | a bold red circle | a bold red circle"


async def test_braces_in_the_text_are_text() -> None:
    stage = _stage(input_adapter="text", adapter_args={"template": "<{text}>"})
    made = await _adapt(stage, REQUEST, StageInput("writer", text="{prompt} {0} {"))
    assert made is not None and made.text == "<{prompt} {0} {>"


async def test_template_that_names_the_unknown_says_what_there_is() -> None:
    stage = _stage(input_adapter="text", adapter_args={"template": "{caption}"})
    assert "text" in (await _refusal(stage, CAPTION)).message


async def test_chat_makes_a_user_message_with_a_system_message_before_it() -> None:
    made = await _adapt(_stage(input_adapter="chat", adapter_args={"system": "be brief"}))
    assert made is not None and made.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a red circle"},
    )


async def test_chat_leaves_a_conversation_alone() -> None:
    talk = EngineInput(messages=({"role": "user", "content": "hello"},))
    made = await _adapt(_stage(input_adapter="chat"), talk)
    assert made is not None and made.messages == talk.messages


async def test_tokens_become_prompt_tokens() -> None:
    made = await _adapt(_stage(input_adapter="tokens"), REQUEST, StageInput("writer", token_ids=(1, 2)))
    assert made is not None and made.token_ids == (1, 2)


@pytest.mark.parametrize("name", ["prompt_embeds", "hidden_states", "anything"])
async def test_tensor_becomes_prompt_embeddings(name: str) -> None:
    array = np.ones((1, 3, 8), dtype=np.float32)
    made = await _adapt(_stage(input_adapter="embeds"), REQUEST, StageInput("writer", tensors={name: array}))
    assert made is not None and made.embeds.shape == (3, 8)


async def test_embeddings_name_what_they_want_and_what_they_got() -> None:
    stage = _stage(input_adapter="embeds", adapter_args={"tensor": "states"})
    error = await _refusal(stage, StageInput("writer", tensors={"x": np.ones((3, 8))}))
    assert "'states'" in error.message and "x" in error.message
    stage = _stage(input_adapter="embeds")
    assert "[3]" in (await _refusal(stage, StageInput("writer", tensors={"x": np.ones(3)}))).message


async def test_diffusion_reads_the_caption_and_its_negative_companion() -> None:
    stage = _stage(stage_type="diffusion")
    negative, wish = StageInput("writer", role="negative", text="text, frames"), replace(REQUEST, negative_text=None)
    made = await _adapt(stage, wish, CAPTION, negative)
    assert made is not None and (made.text, made.negative_text) == ("a bold red circle", "text, frames")
    made = await _adapt(stage, wish, CAPTION)
    assert made is not None and made.negative_text is None


async def test_negative_prompt_of_the_client_wins_over_the_companions() -> None:
    stage, negative = _stage(stage_type="diffusion"), StageInput("writer", role="negative", text="text, frames")
    assert REQUEST.negative_text == "blurry"
    made = await _adapt(stage, REQUEST, CAPTION, negative)
    assert made is not None and made.negative_text == "blurry"


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (StageInput("w", text="x"), "text"),
        (StageInput("w", token_ids=(1,)), "token_ids"),
        (StageInput("w", tensors={"prompt_embeds": np.ones((2, 4))}), "embeds"),
        (StageInput("w", tensors={"hidden_states": np.ones((2, 4))}), "embeds"),
    ],
)
async def test_stage_without_an_adapter_reads_what_arrives(item: StageInput, field: str) -> None:
    made = await _adapt(_stage(), REQUEST, item)
    assert made is not None and getattr(made, field) is not None


@pytest.mark.parametrize("adapter", [None, "text", "chat", "tokens", "embeds", "diffusion"])
async def test_R17_nothing_from_upstream_is_nothing_to_do(adapter: str | None) -> None:
    assert await _adapt(_stage(input_adapter=adapter), REQUEST, StageInput("writer")) is None


# The operator's own, by dotted path.


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("own_adapters")
    sys.modules["own_adapters"] = made
    yield made
    del sys.modules["own_adapters"]


async def test_R17_own_adapter_runs_off_the_event_loop(module: types.ModuleType) -> None:
    threads = []

    def adapter(prompt: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput:
        threads.append(threading.current_thread())
        return EngineInput(text=f"{prompt.text} / {inputs[0].text} / {stage.name}")

    module.adapter = adapter
    made = await _adapt(_stage(input_adapter="own_adapters.adapter"), REQUEST, CAPTION)
    assert made is not None and made.text == "a red circle / a bold red circle / painter"
    assert threads[0] is not threading.main_thread()


async def test_R17_own_adapter_that_raises_fails_the_request_with_its_words(module: types.ModuleType) -> None:
    def adapter(*_: object) -> EngineInput:
        raise KeyError("caption")

    module.adapter = adapter
    error = await _refusal(_stage(input_adapter="own_adapters:adapter"), CAPTION)
    assert "KeyError: 'caption'" in error.message and error.metadata["stage"] == "painter"


@pytest.mark.parametrize(
    "raised", [SystemExit(3), asyncio.CancelledError("its own"), StopIteration("its own"), TimeoutError("its own")]
)
async def test_own_adapter_cannot_end_cancel_or_time_out_anything_but_its_task(
    module: types.ModuleType, raised: BaseException
) -> None:
    def adapter(*_: object) -> EngineInput:
        raise raised

    class Remembering:
        def __init__(self) -> None:
            raise raised

    for module.adapter in (adapter, Remembering):
        error = await _refusal(_stage(input_adapter="own_adapters:adapter"), CAPTION)
        assert f"{type(raised).__name__}: {raised}" in error.message


async def test_R17_own_adapter_that_hangs_is_given_up(module: types.ModuleType) -> None:
    release = threading.Event()
    module.adapter = lambda *_: release.wait()
    runner = AdapterRunner(_stage(input_adapter="own_adapters.adapter"), timeout_s=0.1)
    with pytest.raises(MeshError, match=r"longer than 0\.1 s"):
        await asyncio.wait_for(runner.for_task()(REQUEST, [CAPTION]), 5)
    release.set()
    runner.close()


@pytest.mark.parametrize(("value", "words"), [(None, "not empty"), ("text", "returned str")])
async def test_own_adapter_that_returns_no_input_fails(module: types.ModuleType, value: object, words: str) -> None:
    module.adapter = lambda *_: value
    assert words in (await _refusal(_stage(input_adapter="own_adapters.adapter"), CAPTION)).message


async def test_own_adapter_may_be_a_class_with_a_memory_per_task(module: types.ModuleType) -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, prompt: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput:
            self.calls += 1
            return EngineInput(text=str(self.calls))

    module.Counting = Counting
    runner = AdapterRunner(_stage(input_adapter="own_adapters.Counting"), timeout_s=1.0)
    first, second = runner.for_task(), runner.for_task()
    texts = [(await task(REQUEST, [CAPTION])).text for task in (first, first, second)]
    assert texts == ["1", "2", "1"]
    runner.close()


async def test_class_may_wait_for_more_on_a_stream_edge_and_only_there(module: types.ModuleType) -> None:
    class Waiting:
        def __call__(self, prompt: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput | None:
            return EngineInput(text="now") if inputs[0].finished else None

    module.Waiting = Waiting
    begun = StageInput("writer", text="a bold", finished=False)
    name = {"input_adapter": "own_adapters.Waiting"}
    runner = AdapterRunner(_stage(**name, inputs=["writer"], edge="stream"), timeout_s=1.0)
    task = runner.for_task()
    assert task.remembers and await task(REQUEST, [begun]) is None
    assert await task(REQUEST, [StageInput("writer")]) == EngineInput(text="now")
    runner.close()
    assert "not empty" in (await _refusal(_stage(**name), begun)).message
    module.function = lambda *_: None
    await _refusal(_stage(input_adapter="own_adapters.function", inputs=["writer"], edge="stream"), begun)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("txt", "text"),
        ("no_such_module.adapter", "no_such_module"),
        ("json.nothing", "nothing"),
        ("sys.path", "callable"),
    ],
)
def test_adapter_that_is_not_there_is_a_configuration_error(name: str, words: str) -> None:
    with pytest.raises(EngineConfigError, match=words):
        AdapterRunner(_stage(input_adapter=name), timeout_s=1.0)
