"""Pipelines of many kinds load, say what they are, and make what is asked: in this process, without the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagemesh_worker.engines.base import EngineConfigError
from stagemesh_worker.engines.diffusion.options import DiffusionOptions
from stagemesh_worker.engines.diffusion.protocol import Item, Run

pytestmark = pytest.mark.engines
pytest.importorskip("diffusers")

from stagemesh_worker.engines.diffusion.adapters import AdapterError, LoraAdapters  # noqa: E402
from stagemesh_worker.engines.diffusion.generation import (  # noqa: E402
    InvalidCallError,
    Made,
    call_pipeline,
    decode_preview,
)
from stagemesh_worker.engines.diffusion.pipeline import cache_backends, describe, load_pipeline  # noqa: E402

Tiny = Callable[[str], Path]


class Loaded:
    """A pipeline with its facts; `make` calls it and keeps what each step said."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.pipe = load_pipeline(str(folder), "cpu", DiffusionOptions(**options))
        self.facts = describe(self.pipe)
        self.steps: list[tuple[int, int]] = []
        self.latents: list[Any] = []

    def make(self, *seeds: int, prompt: str | None = "a red circle", steps: int = 3, **run: Any) -> list[Made]:
        items = tuple(Item(number, prompt, None, (seed,)) for number, seed in enumerate(seeds))
        call = {"num_inference_steps": steps, **run.pop("call", {})}
        self.steps, self.latents = [], []
        return call_pipeline(self.pipe, self.facts, Run(items, call, **run), self._step)

    def _step(self, step: int, total: int, latents: Any) -> None:
        self.steps.append((step, total))
        self.latents.append(latents)


@pytest.fixture(scope="module")
def image(tiny: Tiny) -> Loaded:
    return Loaded(tiny("image"))


@pytest.fixture(scope="module")
def flux(tiny: Tiny) -> Loaded:
    return Loaded(tiny("flux"))


# ------------------------------------------------------------------ kinds of pipelines
def test_a_stable_diffusion_pipeline_is_described_by_what_it_takes(image: Loaded) -> None:
    facts = image.facts
    assert (facts.class_name, facts.modality) == ("StableDiffusionPipeline", "image")
    assert (facts.native_height, facts.native_width) == (64, 64)
    assert (facts.takes_prompt, facts.batches_prompts, facts.previews, facts.lora) == (True, True, True, True)
    assert {facts.arguments[name] for name in ("height", "width", "num_inference_steps", "clip_skip")} == {"int"}
    assert facts.arguments["guidance_scale"] == "float"
    assert facts.arguments["prompt"] == "any"


def test_each_step_is_told(image: Loaded) -> None:
    made = image.make(1, steps=4)
    assert image.steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert made[0].array.shape == (64, 64, 3)
    assert made[0].array.dtype == np.uint8


def test_the_same_seed_is_the_same_picture_and_another_is_another(image: Loaded) -> None:
    first, again, other = image.make(5)[0].array, image.make(5)[0].array, image.make(6)[0].array
    assert np.array_equal(first, again)
    assert np.abs(first.astype(int) - other).mean() > 3


def test_a_seed_in_a_batch_is_the_picture_it_is_alone(image: Loaded) -> None:
    batch = image.make(1, 2, 3, 4)
    for seed, made in zip((1, 2, 3, 4), batch, strict=True):
        alone = image.make(seed)[0].array
        # Sums in another order differ in the last bit: here and there a value rounds to its neighbour.
        difference = np.abs(made.array.astype(int) - alone)
        assert difference.max() <= 1
        assert (difference > 0).mean() < 0.01


def test_a_transformer_with_packed_latents_has_steps_and_previews(flux: Loaded) -> None:
    assert flux.facts.class_name == "FluxPipeline"
    made = flux.make(1, steps=3, call={"height": 32, "width": 32, "max_sequence_length": 16})
    assert made[0].array.shape == (32, 32, 3)
    assert flux.steps == [(1, 3), (2, 3), (3, 3)]
    preview = decode_preview(flux.pipe, flux.latents[-1][0], 32, 32)
    assert preview.shape == (32, 32, 3)
    # After the last step the preview is the picture itself.
    assert np.abs(preview.astype(int) - made[0].array).max() <= 1


def test_the_last_preview_is_the_picture(image: Loaded) -> None:
    made = image.make(1, steps=3)
    preview = decode_preview(image.pipe, image.latents[-1][0], 64, 64)
    assert np.abs(preview.astype(int) - made[0].array).max() <= 1


def test_a_pipeline_without_prompt_or_callback_works_too(tiny: Tiny) -> None:
    loaded = Loaded(tiny("unconditional"))
    assert (loaded.facts.takes_prompt, loaded.facts.previews) == (False, False)
    made = loaded.make(7, prompt=None, steps=3)
    assert made[0].array.shape == (16, 16, 3)
    assert loaded.steps == [(1, 3), (2, 3), (3, 3)]
    assert np.array_equal(loaded.make(7, prompt=None, steps=3)[0].array, made[0].array)
    assert "step" not in vars(loaded.pipe.scheduler)


def test_sound_comes_as_samples_by_channel_at_its_rate(tiny: Tiny) -> None:
    loaded = Loaded(tiny("audio"))
    assert (loaded.facts.modality, loaded.facts.sample_rate_hz) == ("audio", 4000)
    made = loaded.make(7, prompt=None, steps=3, call={"audio_length_in_s": 0.5})
    assert made[0].array.shape == (2000, 2)
    assert made[0].array.dtype == np.float32
    assert len(loaded.steps) == 3


def test_moving_pictures_come_frame_by_frame(tiny: Tiny) -> None:
    loaded = Loaded(tiny("video"))
    assert loaded.facts.modality == "video"
    made = loaded.make(7, steps=2, call={"num_frames": 4, "height": 32, "width": 32})
    assert made[0].array.shape == (4, 32, 32, 3)
    assert made[0].array.dtype == np.uint8


# ------------------------------------------------------------------ arguments
def test_several_pictures_of_several_prompts_keep_their_order(image: Loaded) -> None:
    items = (Item(1, "a red circle", None, (1, 2)), Item(2, "a blue square", None, (3, 4)))
    run = Run(items, {"num_inference_steps": 2})
    together = [made.array for made in call_pipeline(image.pipe, image.facts, run, lambda *_: None)]
    for prompt, seed, place in (("a red circle", 2, 1), ("a blue square", 3, 2)):
        alone = image.make(seed, prompt=prompt, steps=2)[0].array
        assert np.abs(together[place].astype(int) - alone).max() <= 1


def test_a_negative_prompt_changes_the_picture(image: Loaded) -> None:
    run = Run((Item(1, "a red circle", "a blue square", (1,)),), {"num_inference_steps": 3})
    made = call_pipeline(image.pipe, image.facts, run, lambda *_: None)
    assert not np.array_equal(made[0].array, image.make(1)[0].array)


def test_embeddings_give_what_their_text_gives(image: Loaded) -> None:
    ids = image.pipe.tokenizer(
        ["a red circle"], padding="max_length", max_length=16, truncation=True, return_tensors="pt"
    ).input_ids
    embeds = image.pipe.text_encoder(ids)[0].detach().numpy()
    made = image.make(1, prompt=None, arrays={"prompt_embeds": embeds}, call={"guidance_scale": 1.0})
    assert np.array_equal(made[0].array, image.make(1, call={"guidance_scale": 1.0})[0].array)


def test_latents_can_be_the_output(image: Loaded) -> None:
    made = image.make(1, latents_out=True)
    assert made[0].array.shape == (4, 16, 16)
    assert made[0].array.dtype == np.float32


def test_what_the_pipeline_refuses_is_named(image: Loaded) -> None:
    with pytest.raises(InvalidCallError, match="divisible by 8") as caught:
        image.make(1, call={"height": 60, "width": 64})
    assert caught.value.field == "height"
    with pytest.raises(InvalidCallError) as caught:
        image.make(1, steps=2000)
    assert caught.value.field == "num_inference_steps"
    assert image.make(1)[0].array.shape == (64, 64, 3)


def test_what_a_step_raises_leaves_the_call_and_the_next_one_is_clean(image: Loaded) -> None:
    undisturbed = image.make(3)[0].array

    class Stop(Exception):
        pass

    def stop(step: int, total: int, latents: Any) -> None:
        if step == 2:
            raise Stop

    with pytest.raises(Stop):
        call_pipeline(image.pipe, image.facts, Run((Item(1, "x", None, (3,)),), {"num_inference_steps": 3}), stop)
    assert np.array_equal(image.make(3)[0].array, undisturbed)


# ------------------------------------------------------------------ options
def test_R21_slicing_reaches_the_vae_and_changes_no_picture(tiny: Tiny, image: Loaded) -> None:
    sparing = Loaded(tiny("image"), vae_use_slicing=True)
    assert sparing.pipe.vae.use_slicing
    for plain, spared in zip(image.make(1, 2), sparing.make(1, 2), strict=True):
        assert np.abs(plain.array.astype(int) - spared.array).max() <= 1


def test_R21_tiling_reaches_the_vae_and_still_makes_a_picture(tiny: Tiny, image: Loaded) -> None:
    sparing = Loaded(tiny("image"), vae_use_tiling=True)
    assert sparing.pipe.vae.use_tiling
    large = sparing.make(1, call={"height": 128, "width": 128})[0].array
    assert large.shape == (128, 128, 3)


def test_dtype_reaches_every_part(tiny: Tiny) -> None:
    loaded = Loaded(tiny("image"), dtype="bfloat16")
    assert {str(part.dtype) for part in (loaded.pipe.unet, loaded.pipe.vae, loaded.pipe.text_encoder)} == {
        "torch.bfloat16"
    }
    assert loaded.make(1, steps=1)[0].array.shape == (64, 64, 3)


def test_R21_a_cache_reuses_features_between_steps(tiny: Tiny, flux: Loaded) -> None:
    call = {"height": 32, "width": 32, "max_sequence_length": 16}
    plain = flux.make(1, steps=6, call=call)[0].array
    cached = Loaded(tiny("flux"), cache_backend="first_block_cache", cache_config={"threshold": 1e9})
    assert cached.pipe.transformer.is_cache_enabled
    calls: list[int] = []
    cached.pipe.transformer.transformer_blocks[-1].attn.register_forward_hook(lambda *_: calls.append(1))
    reused = cached.make(1, steps=6, call=call)[0].array
    assert not np.array_equal(reused, plain)
    assert len(calls) < 6  # the last block was left out in some steps
    # The state of one call never reaches the next.
    assert np.array_equal(cached.make(1, steps=6, call=call)[0].array, reused)


def test_an_attention_backend_can_be_chosen(tiny: Tiny, flux: Loaded) -> None:
    call = {"height": 32, "width": 32, "max_sequence_length": 16}
    native = Loaded(tiny("flux"), attention_backend="native")
    difference = native.make(1, call=call)[0].array.astype(int) - flux.make(1, call=call)[0].array
    assert np.abs(difference).max() <= 1


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("image", {"enable_cpu_offload": True}, "no meaning on a CPU"),
        ("image", {"cache_backend": "first_block_cache"}, "UNet2DConditionModel cannot reuse"),
        ("flux", {"cache_backend": "tea_cache"}, "'tea_cache': known are .*first_block_cache"),
        (
            "flux",
            {"cache_backend": "first_block_cache", "cache_config": {"treshold": 1}},
            "cache_config: .*treshold",
        ),
        ("flux", {"cache_backend": "cache_dit"}, "pip install cache-dit"),
        ("flux", {"attention_backend": "quick"}, "attention_backend: "),
        ("unconditional", {"vae_use_tiling": True}, "VAE of DDPMPipeline cannot"),
        ("image", {"diffusers_load_kwargs": {"varaint": "fp16"}}, "varaint: .*did you mean variant"),
        ("image", {"quantization_config": {"bits": 4}}, "quantization_config: .*bits"),
    ],
)
def test_an_option_that_does_not_fit_the_pipeline_is_named(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any], says: str
) -> None:
    monkeypatch.setitem(sys.modules, "cache_dit", None)  # as if it were not installed
    with pytest.raises(EngineConfigError, match=says):
        load_pipeline(str(tiny(kind)), "cpu", DiffusionOptions(**options))


def test_caches_are_found_under_plain_names() -> None:
    assert {"first_block_cache", "mag_cache", "faster_cache"} <= cache_backends().keys()


# ------------------------------------------------------------------ LoRA
def test_adapters_switch_between_calls_and_leave_no_trace(tiny: Tiny) -> None:
    loaded = Loaded(tiny("image"))
    adapters = LoraAdapters(loaded.pipe, {"ink": str(tiny("lora"))})
    plain = loaded.make(1)[0].array
    adapters.use("ink")
    inked = loaded.make(1)[0].array
    adapters.use("ink", 0.3)
    fainter = loaded.make(1)[0].array
    adapters.use(None)
    assert np.array_equal(loaded.make(1)[0].array, plain)
    assert not np.array_equal(inked, plain)
    assert not np.array_equal(inked, fainter)
    adapters.use("ink")
    assert np.array_equal(loaded.make(1)[0].array, inked)
    assert adapters.names() == ["ink"]
    assert adapters.unload("ink")
    assert not adapters.unload("ink")
    assert np.array_equal(loaded.make(1)[0].array, plain)


def test_loading_an_adapter_does_not_switch_it_on(tiny: Tiny) -> None:
    loaded = Loaded(tiny("image"))
    adapters = LoraAdapters(loaded.pipe, {"ink": str(tiny("lora"))})
    plain = loaded.make(1)[0].array
    adapters.load("ink")
    assert np.array_equal(loaded.make(1)[0].array, plain)


def test_an_adapter_that_is_always_on_stays_on(tiny: Tiny) -> None:
    loaded = Loaded(tiny("image"))
    adapters = LoraAdapters(loaded.pipe, {"ink": str(tiny("lora") / "pytorch_lora_weights.safetensors")})
    adapters.use("ink", 0.5)
    half = loaded.make(1)[0].array
    always = Loaded(tiny("image"))
    fixed = LoraAdapters(always.pipe, {})
    fixed.load_always_on(str(tiny("lora")), 0.5)
    assert np.array_equal(always.make(1)[0].array, half)
    fixed.use(None)
    assert np.array_equal(always.make(1)[0].array, half)
    assert fixed.names() == []
    assert not fixed.unload("always-on")


def test_an_adapter_off_the_list_or_unreadable_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not weights")
    loaded = Loaded(tiny("image"))
    adapters = LoraAdapters(loaded.pipe, {"broken": str(broken), "gone": "/no/such/folder"})
    with pytest.raises(AdapterError, match=r"'other' is not one of the stage's lora_modules \(broken, gone\)"):
        adapters.use("other")
    with pytest.raises(AdapterError, match="no such file"):
        adapters.use("gone")
    plain = loaded.make(1)[0].array
    with pytest.raises(AdapterError, match=r"broken\.safetensors"):
        adapters.use("broken")
    adapters.use(None)
    assert np.array_equal(loaded.make(1)[0].array, plain)
