"""Small diffusers pipelines with random weights: real classes, a second to make, a few hundred kilobytes."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DanceDiffusionPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    IPNDMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    TextToVideoSDPipeline,
    UNet1DModel,
    UNet2DConditionModel,
    UNet2DModel,
    UNet3DConditionModel,
)
from diffusers.utils import convert_state_dict_to_diffusers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"


def make_tokenizer(length: int = 16) -> CLIPTokenizer:
    """A CLIP tokenizer that knows single characters only."""
    tokens = ["<|startoftext|>", "<|endoftext|>", *CHARACTERS, *(f"{letter}</w>" for letter in CHARACTERS)]
    return CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)}, merges=[], model_max_length=length
    )


def make_text_encoder(tokenizer: CLIPTokenizer, width: int = 32) -> CLIPTextModel:
    """One CLIP layer."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=tokenizer.model_max_length,
            projection_dim=width,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_vae(latent_channels: int = 4) -> AutoencoderKL:
    """A VAE that makes four pixels of a latent's side."""
    return AutoencoderKL(
        block_out_channels=(8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=latent_channels,
        norm_num_groups=4,
        layers_per_block=1,
    )


def make_image_pipeline(folder: Path) -> Path:
    """A StableDiffusionPipeline of 64 x 64 pixels."""
    _stable_diffusion(StableDiffusionPipeline).save_pretrained(folder)
    return folder


def make_edit_pipeline(folder: Path) -> Path:
    """The same, from a picture to a picture."""
    _stable_diffusion(StableDiffusionImg2ImgPipeline).save_pretrained(folder)
    return folder


def make_inpaint_pipeline(folder: Path) -> Path:
    """The same, from a picture and a mask to a picture."""
    _stable_diffusion(StableDiffusionInpaintPipeline).save_pretrained(folder)
    return folder


def _stable_diffusion(kind: type[DiffusionPipeline]) -> DiffusionPipeline:
    torch.manual_seed(7)
    tokenizer = make_tokenizer()
    return kind(
        vae=make_vae(),
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=32,
            attention_head_dim=4,
            norm_num_groups=4,
        ),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def make_flux_pipeline(folder: Path) -> Path:
    """A FluxPipeline of 32 x 32 pixels: a transformer, packed latents, two text encoders."""
    torch.manual_seed(7)
    clip = make_tokenizer()
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=4,
            layers_per_block=1,
            shift_factor=0.1,
            scaling_factor=0.4,
        ),
        text_encoder=make_text_encoder(clip),
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(
            T5Config(vocab_size=len(clip), d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
        ),
        tokenizer_2=make_tokenizer(),
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 6, 6),
        ),
    )
    pipe.save_pretrained(folder)
    return folder


def make_unconditional_pipeline(folder: Path) -> Path:
    """A DDPMPipeline of 16 x 16 pixels: no prompt, no VAE, no callback."""
    torch.manual_seed(7)
    unet = UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
    )
    DDPMPipeline(unet=unet, scheduler=DDPMScheduler()).save_pretrained(folder)
    return folder


def make_audio_pipeline(folder: Path) -> Path:
    """A DanceDiffusionPipeline of half a second at 4 kHz in stereo."""
    torch.manual_seed(7)
    unet = UNet1DModel(
        sample_size=2048,
        sample_rate=4000,
        in_channels=2,
        out_channels=2,
        extra_in_channels=64,
        block_out_channels=(32, 32, 64),
        flip_sin_to_cos=True,
        time_embedding_type="fourier",
        use_timestep_embedding=False,
        mid_block_type="UNetMidBlock1D",
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )
    DanceDiffusionPipeline(unet=unet, scheduler=IPNDMScheduler()).save_pretrained(folder)
    return folder


def make_video_pipeline(folder: Path) -> Path:
    """A TextToVideoSDPipeline of 32 x 32 pixels."""
    torch.manual_seed(7)
    tokenizer = make_tokenizer()
    pipe = TextToVideoSDPipeline(
        vae=make_vae(),
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=UNet3DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16),
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            layers_per_block=1,
            cross_attention_dim=32,
            attention_head_dim=4,
            norm_num_groups=4,
        ),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
    )
    pipe.save_pretrained(folder)
    return folder


def make_lora(pipeline_folder: Path, folder: Path) -> Path:
    """A LoRA adapter of the image pipeline's UNet that changes the picture a lot."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe = StableDiffusionPipeline.from_pretrained(pipeline_folder, local_files_only=True)
    pipe.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False))
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.unet))
    layers = {name: weight * 3 for name, weight in layers.items()}
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)
    return folder
