"""vLLM replicas of other kinds: LoRA adapters, a pooler whose states prompt the next model, the example's writer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from replica_harness import StartReplica, submit

from stagemesh.config import load_pipeline
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.tensors import decode
from stagemesh.v1 import stage_pb2 as stage_pb

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

START_S = 240.0
SHAPES = Path(__file__).parents[3] / "examples" / "shapes" / "pipeline.yaml"
GREEDY = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}


def _make_lora(folder: Path, seed: int) -> Path:
    """An adapter of rank 8 for the attention of the tiny Llama, far from zero."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    folder.mkdir()
    weights = {}
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, 64) * 0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(64, 8) * 0.5
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


async def test_R15_lora_of_the_allow_list_changes_the_output_of_its_request_only(
    start_replica: StartReplica, tiny_llama: Path, tmp_path: Path
) -> None:
    modules = {name: str(_make_lora(tmp_path / name, seed)) for seed, name in enumerate(("cartoon", "sketch"))}
    replica = await start_replica(
        engine="vllm", model=str(tiny_llama), lora_modules=modules, engine_args={"max_model_len": 128}
    )
    await replica.ready(START_S)
    link = await replica.link()
    adapters = [None, "cartoon", "sketch", None, "cartoon"]
    tasks = [submit(slot, "a red circle", llm=GREEDY) for slot in range(1, 6)]
    for task, name in zip(tasks, adapters, strict=True):
        if name is not None:
            task.lora.name = name
    await link.send(submits=tasks)
    outputs = []
    for slot in range(1, 6):
        assert (await link.end_of(slot)).HasField("finished"), link.ending(slot)
        outputs.append(link.token_ids(slot))
    assert outputs[0] == outputs[3] and outputs[1] == outputs[4]
    assert len({tuple(ids) for ids in outputs}) == 3
    task = submit(6, "a red circle", llm=GREEDY)
    task.lora.name = "cartoon"
    task.lora.scale = 0.5
    await link.send(submits=[task])
    error = MeshError.from_status((await link.end_of(6)).failed)
    assert error.reason == Reason.INVALID_REQUEST and error.metadata["field"] == "lora.scale"
    await link.close()


async def test_hidden_states_of_a_pooler_are_those_of_transformers(
    start_replica: StartReplica, tiny_llama: Path
) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaModel

    replica = await start_replica(
        engine="vllm", model=str(tiny_llama), final_output_type="latent",
        engine_args={"max_model_len": 128, "runner": "pooling", "convert": "embed"},
    )  # fmt: skip
    await replica.ready(START_S)
    link = await replica.link()
    await link.submit(1, "a red circle")
    assert (await link.end_of(1)).HasField("finished"), link.ending(1)
    tensor = link.events(1, "tensor")[0].tensor
    model, tokenizer = LlamaModel.from_pretrained(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    with torch.no_grad():
        expected = model(**tokenizer("a red circle", return_tensors="pt")).last_hidden_state[0].numpy()
    assert tensor.name == "hidden_states"
    np.testing.assert_allclose(decode(tensor.value.inline), expected, rtol=1e-3, atol=1e-3)
    task = submit(2, "a red circle")
    task.params.llm.extra.update({"pooling_task": "embed"})
    await link.send(submits=[task])
    await link.end_of(2)
    embedding = link.events(2, "tensor")[0].tensor
    assert embedding.name == "embedding" and decode(embedding.value.inline).shape == (64,)
    await link.close()


@pytest.mark.skipif(not (SHAPES.parent / "models" / "writer").exists(), reason="the writer is not trained yet")
async def test_writer_of_the_example_turns_a_wish_into_a_caption(start_replica: StartReplica) -> None:
    stage = load_pipeline(SHAPES).stage("writer")
    replica = await start_replica(**stage.model_dump(mode="json"))
    await replica.ready(START_S)
    link = await replica.link()
    task = stage_pb.SubmitTask(slot=1, request_id="r", delta=True)
    task.prompt.text = "please draw me a big red circle on a blue background"
    task.params.llm.temperature = 0.0
    task.params.llm.max_tokens = 32
    await link.send(submits=[task])
    finished = (await link.end_of(1)).finished
    caption = link.text(1)
    assert all(word in caption for word in ("red", "circle", "blue")), caption
    assert finished.finish_reason == 1 and finished.usage.prompt_tokens > 8
    await link.close()
