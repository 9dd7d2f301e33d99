"""The parts of the painter before training: tokenizer, networks, noise schedule, and how the VAE starts."""

import json

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from world import RGB, SHAPES, SIDE, SIZES

CAPTION_TOKENS = 16
"""Length that every caption is padded to; the longest has 11 tokens."""


def make_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer in which each word of a caption is one token."""
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789.,!?'-")
    words = ["a", "an", "on", "the", "background", "gray", *RGB, *SHAPES, *SIZES]
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, min_frequency=2, end_of_word_suffix="</w>", show_progress=False
    )
    bpe.train_from_iterator([word for word in words for _ in range(50)], trainer)
    merges = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    tokens += [left + right for left, right in merges]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CAPTION_TOKENS)
    split = [word for word in words if len(tokenizer(word).input_ids) != 3]
    if split:
        raise RuntimeError(f"words of more than one token: {split}")
    return tokenizer


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Two CLIP layers, 64 wide."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CAPTION_TOKENS,
        projection_dim=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def make_unet() -> UNet2DConditionModel:
    """A UNet on 16 x 16 latents; the pooled caption also joins the time embedding."""
    return UNet2DConditionModel(
        sample_size=SIDE // 4,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=4,
        addition_embed_type="text",
        addition_embed_type_num_heads=4,
        resnet_time_scale_shift="scale_shift",
    )


def make_scheduler() -> DDIMScheduler:
    """Zero terminal SNR with v-prediction and trailing steps: flat backgrounds get their exact colour.

    See "Common Diffusion Noise Schedules and Sample Steps are Flawed", https://arxiv.org/abs/2305.08891.
    """
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=1e-4,
        beta_end=0.02,
        beta_schedule="linear",
        clip_sample=False,
        set_alpha_to_one=True,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        steps_offset=1,
    )


def make_vae() -> AutoencoderKL:
    """64 x 64 pixels <-> 16 x 16 latents of 4 channels, started as plain averaging and repeating."""
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        sample_size=SIDE,
        mid_block_add_attention=False,
        scaling_factor=1.0,
    )
    _start_as_average(vae)
    return vae


@torch.no_grad()
def _start_as_average(vae: AutoencoderKL, constant: float = 2.0) -> None:
    """Make the fresh VAE "average 4 x 4 pixels, repeat 4 x 4 pixels": it then learns in minutes, not hours.

    Red, green and blue travel in pairs of channels, +x and -x, because silu(x) - silu(-x) = x exactly. Two
    constant channels of +-`constant` keep the scale that the one-group GroupNorm divides by nearly fixed.
    """
    for part in (vae.encoder, vae.decoder):
        for module in part.modules():
            kind = type(module).__name__
            if kind == "ResnetBlock2D":
                module.conv2.weight *= 0.2
                module.conv2.bias.zero_()
                if module.conv_shortcut is not None:
                    _pass_through(module.conv_shortcut, [(0, 0)])
            elif kind == "Downsample2D":
                _pass_through(module.conv, [(0, 0), (0, 1), (1, 0), (1, 1)])
            elif kind == "Upsample2D":
                _pass_through(module.conv, [(1, 1)])
        _spread_colours(part.conv_in, constant)
    _gather_colours(vae.encoder.conv_out, 1.0)
    _gather_colours(vae.decoder.conv_out, 1.15)
    channels = vae.config.latent_channels
    for conv in (vae.quant_conv, vae.post_quant_conv):
        conv.bias.zero_()
        conv.weight[:channels] = torch.eye(channels, conv.weight.shape[1])[:, :, None, None]
    vae.quant_conv.weight[channels:] *= 0.1
    vae.quant_conv.bias[channels:] = -6.0


def _pass_through(conv: torch.nn.Conv2d, taps: list[tuple[int, int]], channels: int = 8) -> None:
    """The first channels pass unchanged, as the average over the given places of the kernel."""
    conv.weight[:channels] = 0
    conv.bias.zero_()
    for channel in range(channels):
        for row, column in taps:
            conv.weight[channel, channel, row, column] = 1 / len(taps)


def _spread_colours(conv: torch.nn.Conv2d, constant: float) -> None:
    """Three channels in; +x, -x of each and the two constants out."""
    conv.weight[:8] = 0
    conv.bias[:8] = 0
    for colour in range(3):
        conv.weight[2 * colour, colour, 1, 1] = 1
        conv.weight[2 * colour + 1, colour, 1, 1] = -1
    conv.bias[6], conv.bias[7] = constant, -constant


def _gather_colours(conv: torch.nn.Conv2d, gain: float) -> None:
    """The inverse of `_spread_colours`, behind a silu."""
    conv.weight[:3] = 0
    conv.bias[:3] = 0
    for colour in range(3):
        conv.weight[colour, 2 * colour, 1, 1] = gain
        conv.weight[colour, 2 * colour + 1, 1, 1] = -gain
