"""engine_args of a diffusion stage: what is wrong is named, with what would be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagemesh_worker.engines.base import EngineConfigError
from stagemesh_worker.engines.diffusion.options import DiffusionOptions


def test_defaults_run_one_picture_at_a_time() -> None:
    options = DiffusionOptions.parse({})
    assert (options.dtype, options.max_num_seqs, options.vae_use_tiling) == ("auto", 1, False)


def test_every_option_can_be_set_and_survives_the_way_to_the_child(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "dtype": "float16",
        "max_num_seqs": 8,
        "batch_wait_ms": 5,
        "max_pixels": 1 << 20,
        "max_num_inference_steps": 50,
        "max_images_per_prompt": 4,
        "vae_use_slicing": True,
        "vae_use_tiling": True,
        "enable_cpu_offload": True,
        "attention_backend": "native",
        "cache_backend": "first_block_cache",
        "cache_config": {"threshold": 0.1},
        "quantization_config": {"quant_backend": "bitsandbytes_4bit"},
        "lora_path": str(tmp_path),
        "lora_scale": 1,
        "diffusers_load_kwargs": {"variant": "fp16"},
        "diffusers_call_kwargs": {"clip_skip": 1},
    }
    assert given.keys() == DiffusionOptions.__dataclass_fields__.keys()
    options = DiffusionOptions.parse(given)
    assert DiffusionOptions(**json.loads(json.dumps(options.to_json()))) == options
    assert options.to_json() == given


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max_num_seq": 4}, r"engine_args\.max_num_seq: .*did you mean max_num_seqs\?"),
        ({"gpu_memory_utilization": 0.5}, "unknown; known are "),
        ({"max_num_seqs": "4"}, "max_num_seqs: '4': must be a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs: True: must be a whole number"),
        ({"max_num_seqs": 0}, "must be at least 1"),
        ({"dtype": "fp16"}, "dtype: 'fp16': must be one of auto, float32"),
        ({"vae_use_tiling": 1}, "must be true or false"),
        ({"batch_wait_ms": -1}, "from 0 to 60000 milliseconds"),
        ({"batch_wait_ms": float("nan")}, "from 0 to 60000 milliseconds"),
        ({"max_pixels": -1}, "max_pixels: -1: "),
        ({"cache_config": {"threshold": 1}}, "no meaning without cache_backend"),
        ({"lora_path": "/no/such/file"}, "lora_path: '/no/such/file': no such file"),
        ({"diffusers_load_kwargs": ["variant"]}, "must be a mapping"),
        ({"diffusers_call_kwargs": {"x": object()}}, "must hold plain values"),
        ({"attention_backend": 3}, "attention_backend: 3: must be a text or nothing"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(args: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineConfigError, match=says) as caught:
        DiffusionOptions.parse(args, "stages[1].engine_args")
    assert "\n" not in str(caught.value)
