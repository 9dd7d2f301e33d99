"""Train the painter: caption -> 64 x 64 picture, saved as a StableDiffusionPipeline folder.

    python train_painter.py OUT [--vae-steps N] [--unet-steps N]

The number of steps, not the clock, ends the training, so that a busy machine only makes it slower.
"""

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from painter_parts import make_scheduler, make_text_encoder, make_tokenizer, make_unet, make_vae
from transformers import CLIPTextModel, CLIPTokenizer
from world import SCENES, TRAIN_SCENES, Scene, caption, render

SIZE_WEIGHTS = {"small": 2.0, "medium": 1.2, "large": 0.8}
"""How often a size is drawn: the small shapes, a few latents wide, are the ones that come out wrong."""
SHAPE_WEIGHT = 3.0
"""Extra weight in the loss of the latents that a shape covers, against those of the flat background."""
LATENT_NOISE = 0.08
"""Noise on the latents, in standard deviations, that the decoder learns to forgive."""
NO_SIZE, NO_CAPTION = 0.05, 0.10
"""Fraction of samples whose caption leaves the size open, or is empty (for guidance)."""


def log(*words: object) -> None:
    print(time.strftime("[%H:%M:%S]"), *words, flush=True)


def learning_rate(done: float, peak: float, warm_up: float = 0.03, floor: float = 0.03) -> float:
    """Linear warm-up, then a cosine down to `floor * peak`; `done` is the finished fraction, 0..1."""
    if done < warm_up:
        return peak * done / warm_up
    cosine = 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))
    return peak * (floor + (1 - floor) * cosine)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


# ----------------------------------------------------------------------------------------- VAE


def train_vae(vae: AutoencoderKL, steps: int, rng: np.random.Generator, batch: int = 8) -> None:
    """Learn pictures <-> latents, in place; the VAE sees every scene and never a caption."""
    parameters = list(vae.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    pick = random.Random(1)
    weights = [SIZE_WEIGHTS[scene.size] for scene in SCENES]
    for number in range(steps):
        set_rate(optimizer, learning_rate(number / steps, 2e-3))
        pictures = torch.from_numpy(render(pick.choices(SCENES, weights, k=batch), rng)[0])
        latents_of = vae.encode(pictures).latent_dist
        latents = latents_of.sample()
        latents = latents + LATENT_NOISE * latents.detach().std() * torch.randn_like(latents)
        decoded = vae.decode(latents).sample
        square, absolute = F.mse_loss(decoded, pictures), F.l1_loss(decoded, pictures)
        divergence = latents_of.kl().mean() / latents[0].numel()
        step(optimizer, square + 0.5 * absolute + 1e-5 * divergence, parameters)
        if (number + 1) % 200 == 0:
            log(f"vae {number + 1}/{steps} mse {square.item():.5f} l1 {absolute.item():.4f}")


@torch.no_grad()
def encode_scenes(
    vae: AutoencoderKL, rng: np.random.Generator, draws: int = 24
) -> tuple[torch.Tensor, torch.Tensor, list[Scene]]:
    """Draw and encode every training scene `draws` times.

    Returns latents [N, 4, 16, 16], the part of each latent that the shape covers [N, 1, 16, 16], scenes.
    """
    latents, covered, scenes = [], [], []
    for _ in range(draws):
        for start in range(0, len(TRAIN_SCENES), 32):
            some = TRAIN_SCENES[start : start + 32]
            pictures, coverage = render(some, rng)
            latents.append(vae.encode(torch.from_numpy(pictures)).latent_dist.mean)
            covered.append(F.avg_pool2d(torch.from_numpy(coverage)[:, None], 4))
            scenes += some
    return torch.cat(latents), torch.cat(covered), scenes


@torch.no_grad()
def normalise(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """Fold a scale and a shift into the VAE's 1 x 1 convolutions: latents get deviation 1 and mean 0."""
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    channels = len(mean)
    into, out = vae.quant_conv, vae.post_quant_conv
    into.weight[:channels] /= deviation.view(-1, 1, 1, 1)
    into.bias[:channels] = (into.bias[:channels] - mean) / deviation
    into.bias[channels:] -= 2 * deviation.log()
    out.bias += out.weight[:, :, 0, 0] @ mean
    out.weight *= deviation.view(1, -1, 1, 1)
    return (latents - mean.view(1, -1, 1, 1)) / deviation.view(1, -1, 1, 1)


# ---------------------------------------------------------------------------------------- UNet


class Captions:
    """Token ids of every sample's caption, full and without its size, and of the empty caption."""

    def __init__(self, tokenizer: CLIPTokenizer, scenes: list[Scene]) -> None:
        def ids(texts: list[str]) -> torch.Tensor:
            return tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids

        self._full = ids([caption(scene) for scene in scenes])
        self._open = ids([caption(scene._replace(size="")) for scene in scenes])
        self._empty = ids([""])

    def draw(self, index: torch.Tensor) -> torch.Tensor:
        """Ids [B, length] for the samples of `index` [B], some with less than the full caption."""
        chosen, dice = self._full[index], torch.rand(len(index))
        chosen[dice < NO_SIZE] = self._open[index][dice < NO_SIZE]
        chosen[dice > 1 - NO_CAPTION] = self._empty
        return chosen


def stratified_timesteps(batch: int) -> torch.Tensor:
    """One random timestep from each of `batch` equal parts of 0..999."""
    return ((torch.arange(batch) + torch.rand(batch)) * 1000 / batch).long().clamp(max=999)


def train_unet(
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    captions: Captions,
    latents: torch.Tensor,
    covered: torch.Tensor,
    sizes: list[str],
    steps: int,
    batch: int = 16,
    peak_rate: float = 1.5e-3,
) -> None:
    """Learn to denoise `latents`, in place; what remains is a moving average of the weights."""
    parameters = [*unet.parameters(), *text_encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=peak_rate, betas=(0.9, 0.99), weight_decay=0.01)
    kept = make_scheduler().alphas_cumprod
    weight = 1 + SHAPE_WEIGHT * covered
    weight = weight / weight.mean((1, 2, 3), keepdim=True)
    how_often = torch.tensor([SIZE_WEIGHTS[size] for size in sizes])
    average = [parameter.detach().clone() for parameter in parameters]
    losses: list[float] = []
    for number in range(steps):
        set_rate(optimizer, learning_rate(number / steps, peak_rate))
        index = torch.multinomial(how_often, batch)
        clean, times = latents[index], stratified_timesteps(batch)
        noise, signal = torch.randn_like(clean), kept[times].view(-1, 1, 1, 1)
        noisy = signal.sqrt() * clean + (1 - signal).sqrt() * noise
        velocity = signal.sqrt() * noise - (1 - signal).sqrt() * clean
        states = text_encoder(captions.draw(index)).last_hidden_state
        predicted = unet(noisy, times, encoder_hidden_states=states).sample
        loss = (weight[index] * (predicted - velocity) ** 2).mean()
        step(optimizer, loss, parameters)
        decay = min(0.998, (2 + number) / (11 + number))
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - decay)
        losses.append(loss.item())
        if (number + 1) % 200 == 0:
            log(f"unet {number + 1}/{steps} loss {np.mean(losses[-200:]):.4f}")
    with torch.no_grad():
        for parameter, smooth in zip(parameters, average, strict=True):
            parameter.copy_(smooth)


# ---------------------------------------------------------------------------------------- main


def save(pipeline: StableDiffusionPipeline, folder: Path) -> None:
    """Save the pipeline, with the two tokenizer files that transformers 4 looks for."""
    pipeline.save_pretrained(folder)
    bpe = json.loads((folder / "tokenizer/tokenizer.json").read_text())["model"]
    (folder / "tokenizer/vocab.json").write_text(json.dumps(bpe["vocab"]))
    merges = "".join(" ".join(pair) + "\n" for pair in bpe["merges"])
    (folder / "tokenizer/merges.txt").write_text("#version: 0.2\n" + merges)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--vae-steps", type=int, default=4000)
    parser.add_argument("--unet-steps", type=int, default=16000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(1)

    tokenizer, vae, unet = make_tokenizer(), make_vae(), make_unet()
    text_encoder = make_text_encoder(tokenizer)
    train_vae(vae, options.vae_steps, rng)
    log("vae done, cpu seconds", round(time.process_time()))
    vae.eval().requires_grad_(False)
    latents, covered, scenes = encode_scenes(vae, rng)
    latents = normalise(vae, latents)
    log("encoded", tuple(latents.shape), "cpu seconds", round(time.process_time()))
    captions = Captions(tokenizer, scenes)
    sizes = [scene.size for scene in scenes]
    train_unet(unet, text_encoder, captions, latents, covered, sizes, options.unet_steps)
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder.eval(),
        tokenizer=tokenizer,
        unet=unet.eval(),
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    save(pipeline, options.out)
    log("saved", options.out, "cpu seconds", round(time.process_time()))


if __name__ == "__main__":
    main()
