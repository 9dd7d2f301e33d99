"""The vLLM engine behind a whole replica process: what a request can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from replica_harness import HeadLink, Replica, submit

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.tensors import encode
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


async def _tokens(link: HeadLink, slot: int, **fields: Any) -> list[int]:
    await link.submit(slot, **fields)
    event = await link.end_of(slot)
    assert event.HasField("finished"), event
    return link.token_ids(slot)


async def _error(link: HeadLink, slot: int, **fields: Any) -> MeshError:
    await link.submit(slot, **fields)
    event = await link.end_of(slot)
    assert event.HasField("failed"), event
    return MeshError.from_status(event.failed)


def _decode(folder: Path, ids: list[int]) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids)


async def test_greedy_output_is_that_of_transformers(link: HeadLink, tiny_llama: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model, tokenizer = LlamaForCausalLM.from_pretrained(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    prompt = tokenizer("a red circle", return_tensors="pt").input_ids
    with torch.no_grad():
        whole = model.generate(prompt, do_sample=False, max_new_tokens=40, min_new_tokens=40, eos_token_id=None)
    expected = whole[0, prompt.shape[1] :].tolist()
    assert len(set(expected)) > 8, "the tiny model repeats itself: it would hide mistakes"
    ids = await _tokens(link, 1, text="a red circle", llm=GREEDY)
    assert ids == expected
    finished = link.ending(1).finished
    assert finished.finish_reason == frame_pb.FINISH_REASON_LENGTH
    assert finished.usage.prompt_tokens == prompt.shape[1]
    assert finished.usage.completion_tokens == 40
    assert link.text(1).rstrip("\ufffd") == _decode(tiny_llama, ids).rstrip("\ufffd")


async def test_64_streams_at_once_are_each_their_own(link: HeadLink) -> None:
    prompts = [f"number {slot} a red circle" for slot in range(1, 65)]
    alone = {slot: await _tokens(link, slot, text=prompts[slot - 1], llm=GREEDY) for slot in (1, 30, 64)}
    link.responses.clear()
    await link.send(submits=[submit(slot, prompts[slot - 1], llm=GREEDY) for slot in range(1, 65)])
    for slot in range(1, 65):
        assert (await link.end_of(slot)).HasField("finished")
        assert len(link.token_ids(slot)) == 40
    assert {slot: link.token_ids(slot) for slot in alone} == alone


async def test_without_deltas_the_output_comes_once(link: HeadLink) -> None:
    expected = await _tokens(link, 1, text="a red circle", llm=GREEDY)
    ids = await _tokens(link, 2, text="a red circle", llm=GREEDY, delta=False)
    assert ids == expected
    assert sum(list(response.columns.slots).count(2) for response in link.responses) == 1


@pytest.mark.parametrize("cut", [1, 7, 20, 39])
@pytest.mark.parametrize("prompt", ["a red circle", "naïve 東京 🙂"])
async def test_resume_gives_the_tokens_and_text_of_an_undisturbed_run(
    link: HeadLink, tiny_llama: Path, prompt: str, cut: int
) -> None:
    ids = await _tokens(link, 1, text=prompt, llm=GREEDY)
    text = link.text(1)
    chars = max(0, len(_decode(tiny_llama, ids[:cut]).rstrip("\ufffd")) - 2)
    rest = await _tokens(
        link, 2, text=prompt, llm=GREEDY, attempt=2, resume_token_ids=ids[:cut], resume_text_chars=chars
    )
    assert ids[:cut] + rest == ids
    assert text[:chars] + link.text(2) == text
    assert link.ending(2).finished.usage.completion_tokens == 40


async def test_resume_of_a_spent_budget_ends_at_once(link: HeadLink) -> None:
    ids = await _tokens(link, 1, text="a red circle", llm=GREEDY)
    text = link.text(1)
    await link.submit(2, "a red circle", llm=GREEDY, resume_token_ids=ids, resume_text_chars=len(text) - 2)
    finished = (await link.end_of(2)).finished
    assert finished.finish_reason == frame_pb.FINISH_REASON_LENGTH and not link.token_ids(2)
    assert text[:-2] + link.text(2) == text


async def test_stop_text_and_stop_token_end_it_also_across_a_resume(link: HeadLink) -> None:
    ids = await _tokens(link, 1, text="a red circle", llm=GREEDY)
    text = link.text(1)
    stop = text[10:13]
    place = text.index(stop)
    stopped = await _tokens(link, 2, text="a red circle", llm=GREEDY | {"stop": [stop]})
    assert link.text(2) == text[:place] and stopped == ids[: len(stopped)]
    finished = link.ending(2).finished
    assert (finished.finish_reason, finished.stop_reason) == (frame_pb.FINISH_REASON_STOP, stop)
    for cut in range(1, len(stopped) + 1):
        slot = 100 + cut
        fields = {"resume_token_ids": ids[:cut], "resume_text_chars": max(0, min(place, cut) - 2)}
        rest = await _tokens(link, slot, text="a red circle", llm=GREEDY | {"stop": [stop]}, **fields)
        assert ids[:cut] + rest == stopped
        assert text[: fields["resume_text_chars"]] + link.text(slot) == text[:place]
    stop_token = next(one for number, one in enumerate(ids) if number > 5 and one not in ids[:number])
    by_token = await _tokens(link, 3, text="a red circle", llm=GREEDY | {"stop_token_ids": [stop_token]})
    assert by_token == ids[: ids.index(stop_token) + 1]
    assert link.ending(3).finished.finish_reason == frame_pb.FINISH_REASON_STOP


async def test_seeded_sampling_is_repeatable_and_seeds_differ(link: HeadLink) -> None:
    sampled = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    runs = [
        await _tokens(link, slot, text="a red circle", llm=sampled | {"seed": seed})
        for slot, seed in ((1, 5), (2, 5), (3, 6))
    ]
    assert runs[0] == runs[1] != runs[2]


async def test_R22_several_completions_come_by_index(link: HeadLink) -> None:
    await link.submit(
        1, "a red circle", llm={"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    )
    finished = (await link.end_of(1)).finished
    texts: dict[int, list[int]] = {}
    for event in link.events(1, "text"):
        texts.setdefault(event.text.index, []).extend(event.text.token_ids)
    assert sorted(texts) == [0, 1, 2] and all(len(ids) == 8 for ids in texts.values())
    assert finished.usage.completion_tokens == 24
    assert len(json_format.MessageToDict(finished.extra)["finish_reasons"]) == 3


async def test_R22_log_probabilities_come_with_each_token(link: HeadLink) -> None:
    expected = await _tokens(link, 1, text="a red circle", llm=GREEDY)
    await link.submit(2, "a red circle", llm=GREEDY | {"logprobs": 2, "prompt_logprobs": 1})
    finished = (await link.end_of(2)).finished
    deltas = [event.text for event in link.events(2, "text")]
    assert [one for delta in deltas for one in delta.token_ids] == expected
    for delta in deltas:
        assert len(delta.logprobs) == len(delta.top_logprobs) == len(delta.token_ids)
        for token_id, logprob, top in zip(delta.token_ids, delta.logprobs, delta.top_logprobs, strict=True):
            assert len(top.token_ids) == 2 and top.token_ids[0] == token_id  # greedy takes the best
            assert top.logprobs[0] == logprob >= top.logprobs[1]
    prompt = json_format.MessageToDict(finished.extra)["prompt_logprobs"]
    assert prompt[0] is None and len(prompt) == finished.usage.prompt_tokens


@pytest.mark.parametrize(
    ("constraint", "check"),
    [
        ({"regex": "[ab]{4}"}, lambda text: len(text) == 4 and set(text) <= {"a", "b"}),
        ({"choice": {"choices": ["red", "green"]}}, lambda text: text in ("red", "green")),
        ({"json_schema": '{"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, '
          '"required": ["colour"], "additionalProperties": false}', "disable_any_whitespace": True},
         lambda text: text in ('{"colour":"red"}', '{"colour":"blue"}')),
        ({"grammar": 'root ::= "x" "y"'}, lambda text: text == "xy"),
    ],
    ids=["regex", "choice", "json", "grammar"],
)  # fmt: skip
async def test_R22_structured_output_has_its_form(link: HeadLink, constraint: dict[str, Any], check: Any) -> None:
    task = submit(1, "a red circle", llm={"temperature": 0.0, "max_tokens": 40})
    json_format.ParseDict(constraint, task.params.llm.structured_outputs)
    await link.send(submits=[task])
    assert (await link.end_of(1)).HasField("finished"), link.ending(1)
    assert check(link.text(1)), link.text(1)


async def test_R22_chat_is_rendered_by_the_models_template(link: HeadLink) -> None:
    task = submit(1, "", llm=GREEDY)
    task.prompt.chat.messages.add(role="user", content="a red circle")
    await link.send(submits=[task])
    await link.end_of(1)
    expected = await _tokens(link, 2, text="<|user|>a red circle<|end|><|assistant|>", llm=GREEDY)
    assert link.token_ids(1) == expected


async def test_R22_token_ids_are_a_prompt(link: HeadLink, tiny_llama: Path) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tiny_llama / "tokenizer.json")).encode("a red circle").ids
    expected = await _tokens(link, 1, text="a red circle", llm=GREEDY)
    task = submit(2, "", llm=GREEDY)
    task.prompt.tokens.ids.extend(ids)
    await link.send(submits=[task])
    await link.end_of(2)
    assert link.token_ids(2) == expected


async def test_R22_embeddings_are_a_prompt_also_across_a_resume(link: HeadLink, tiny_llama: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    model, tokenizer = LlamaForCausalLM.from_pretrained(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    ids = tokenizer("a red circle", return_tensors="pt").input_ids
    embeds = model.get_input_embeddings()(ids)[0].detach().numpy()
    expected = await _tokens(link, 1, text="a red circle", llm=GREEDY)
    for slot, resume in ((2, []), (3, expected[:11])):
        task = submit(slot, "", llm=GREEDY, resume_token_ids=resume)
        task.prompt.embeds.inline.CopyFrom(encode(np.ascontiguousarray(embeds)))
        await link.send(submits=[task])
        assert (await link.end_of(slot)).HasField("finished"), link.ending(slot)
        assert resume + link.token_ids(slot) == expected


async def test_R12_streaming_input_continues_the_context(link: HeadLink) -> None:
    """The context of a chunk is all chunks and outputs before it, but for the last token of each output."""
    llm = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    await link.submit(1, "a red", llm=llm, more_input=True)
    await link.until(lambda link: len(link.token_ids(1)) == 5)
    chunk = stage_pb.AppendInput(slot=1, last=True)
    chunk.prompt.text = " circle on"
    await link.send(appends=[chunk])
    finished = (await link.end_of(1)).finished
    ids = link.token_ids(1)
    assert len(ids) == 10 and finished.usage.completion_tokens == 10
    assert sum(event.input_taken.chunks for event in link.events(1, "input_taken")) == 1
    first = await _tokens(link, 2, text="a red", llm=llm)
    assert ids[:5] == first


async def test_streaming_input_may_have_many_chunks_sent_at_once(link: HeadLink) -> None:
    llm = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
    await link.submit(1, "one", llm=llm, more_input=True)
    chunks = []
    for number in range(6):
        chunk = stage_pb.AppendInput(slot=1, last=number == 5)
        chunk.prompt.text = f" and {number}"
        chunk.params.llm.CopyFrom(submit(1, "", llm=llm | {"max_tokens": number + 1}).params.llm)
        chunks.append(chunk)
    await link.send(appends=chunks)
    await link.end_of(1)
    assert len(link.token_ids(1)) == 3 + 1 + 2 + 3 + 4 + 5 + 6


async def test_streaming_input_that_ends_later_without_content(link: HeadLink) -> None:
    await link.submit(1, "one", llm={"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}, more_input=True)
    await link.until(lambda link: len(link.token_ids(1)) == 3)
    await link.send(appends=[stage_pb.AppendInput(slot=1, last=True)])
    assert (await link.end_of(1)).finished.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("llm", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"n": 2, "temperature": 0.0}, "n"),
        ({"bad_words": [""]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"logprobs": 1000}, "logprobs"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_value_names_its_field_and_the_engine_lives(link: HeadLink, llm: dict[str, Any], field: str) -> None:
    error = await _error(link, 1, llm=llm)
    assert error.reason == Reason.INVALID_REQUEST, error
    assert field in error.message
    assert len(await _tokens(link, 2, text="a red circle", llm=GREEDY)) == 40


@pytest.mark.parametrize(
    "constraint",
    [{"regex": "(["}, {"json_schema": "{"}, {"choice": {}}, {"json_object": False}, {"grammar": "root ::= ("}],
    ids=str,
)
async def test_bad_structured_output_fails_its_own_request(link: HeadLink, constraint: dict[str, Any]) -> None:
    task = submit(1, "a red circle", llm={"max_tokens": 5})
    json_format.ParseDict(constraint, task.params.llm.structured_outputs)
    await link.send(submits=[task])
    assert (await link.end_of(1)).HasField("failed")
    assert len(await _tokens(link, 2, text="a red circle", llm=GREEDY)) == 40


async def test_unknown_extra_has_a_hint_and_a_known_one_works(link: HeadLink) -> None:
    task = submit(1, "a red circle", llm=GREEDY)
    task.params.llm.extra.update({"thinking_token_bugdet": 3})
    await link.send(submits=[task])
    error = MeshError.from_status((await link.end_of(1)).failed)
    assert "extra.thinking_token_bugdet" in error.message and "thinking_token_budget" in error.message
    task = submit(2, "a red circle", llm=GREEDY)
    task.params.llm.extra.update({"skip_reading_prefix_cache": True})
    await link.send(submits=[task])
    assert (await link.end_of(2)).HasField("finished"), link.ending(2)


async def test_prompt_beyond_the_model_is_too_large_unless_truncated(link: HeadLink) -> None:
    error = await _error(link, 1, text="x" * 2000, llm=GREEDY)
    assert error.reason == Reason.PROMPT_TOO_LARGE and error.metadata["limit"] == "255"
    assert await _tokens(link, 2, text="x" * 2000, llm=GREEDY | {"truncate_prompt_tokens": 50})
    assert link.ending(2).finished.usage.prompt_tokens == 50


async def test_unknown_lora_is_refused_by_name(link: HeadLink) -> None:
    error = await _error(link, 1, lora={"name": "cartoon"})
    assert error.reason == Reason.INVALID_REQUEST and error.metadata["field"] == "lora.name"


async def test_images_are_refused_by_a_text_model(link: HeadLink) -> None:
    task = submit(1, "look", llm=GREEDY)
    task.prompt.media.add(modality="image", data=b"x")
    await link.send(submits=[task])
    assert "prompt.media" in MeshError.from_status((await link.end_of(1)).failed).message


async def test_abort_returns_the_memory_of_the_request(link: HeadLink, llama: Replica) -> None:
    long = {"max_tokens": 200, "ignore_eos": True}
    await link.send(submits=[submit(slot, "a red circle", llm=long) for slot in range(1, 33)])
    await link.until(lambda link: len(link.token_ids(1)) > 3)
    await link.send(aborts=[stage_pb.AbortTask(slot=slot) for slot in range(1, 33)])
    for slot in range(1, 33):
        assert link.ending(slot) is None or link.ending(slot).HasField("aborted")
        await link.end_of(slot)
    while not any(response.HasField("load") and not response.load.running for response in link.responses[-1:]):
        await link.until(lambda link, seen=len(link.responses): len(link.responses) > seen)
    assert link.responses[-1].load.kv_cache_usage == 0
