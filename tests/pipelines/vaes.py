"""Tiny autoencoders of images. A level halves height and width; none is trained."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanImage,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
)


def kl(channels: int = 4, *, levels: int = 1, width: int = 4, quant: bool = False) -> AutoencoderKL:
    """AutoencoderKL with so many latent channels, which makes images 2 ** (levels - 1) times smaller."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(width,) * levels,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=1,
        sample_size=32,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
        mid_block_add_attention=False,
        scaling_factor=1.5,
        shift_factor=0.06,
    ).eval()


def flux2(channels: int = 4, *, levels: int = 4, width: int = 4) -> AutoencoderKLFlux2:
    """AutoencoderKLFlux2, which makes images 2 ** (levels - 1) times smaller; its statistics differ by channel."""
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(width,) * levels,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=1,
        sample_size=32,
        mid_block_add_attention=False,
    ).eval()
    vae.bn.running_mean.copy_(torch.linspace(-0.3, 0.4, 4 * channels))
    vae.bn.running_var.copy_(torch.linspace(0.5, 1.5, 4 * channels))
    return vae


def qwen_image(channels: int = 4, *, levels: int = 3, width: int = 2, blocks: int = 1) -> AutoencoderKLQwenImage:
    """AutoencoderKLQwenImage (causal, of videos), which makes images 2 ** levels times smaller."""
    return AutoencoderKLQwenImage(
        base_dim=width,
        z_dim=channels,
        dim_mult=[1] * (levels + 1),
        num_res_blocks=blocks,
        temperal_downsample=[False] * levels,
        latents_mean=[0.1] * channels,
        latents_std=[0.9] * channels,
    ).eval()


def dc(channels: int = 4, *, levels: int = 6, width: int = 8) -> AutoencoderDC:
    """AutoencoderDC, which makes images 2 ** (levels - 1) times smaller; its last level has attention."""
    kinds = ("ResBlock",) * (levels - 1) + ("EfficientViTBlock",)
    scales = ((),) * (levels - 1) + ((5,),)
    return AutoencoderDC(
        in_channels=3,
        latent_channels=channels,
        attention_head_dim=2,
        encoder_block_types=kinds,
        decoder_block_types=kinds,
        encoder_block_out_channels=(width,) * levels,
        decoder_block_out_channels=(width,) * levels,
        encoder_layers_per_block=(1,) * levels,
        decoder_layers_per_block=(1,) * levels,
        encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41,
    ).eval()


def hunyuan_image(channels: int = 4) -> AutoencoderKLHunyuanImage:
    """AutoencoderKLHunyuanImage, which makes images 8 times smaller. (Its norms have 32 groups.)"""
    return AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=channels,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=32,
        scaling_factor=0.75,
    ).eval()


def qwen_image21(channels: int = 8, *, width: int = 2) -> AutoencoderKLQwenImage21:
    """AutoencoderKLQwenImage21 (causal, of videos, with an alpha channel), which makes images 16 times smaller."""
    return AutoencoderKLQwenImage21(
        base_dim=width,
        decoder_base_dim=width,
        z_dim=channels,
        dim_mult=[1] * 5,
        num_res_blocks=1,
        temperal_downsample=[False] * 4,
        latents_mean=[0.1] * channels,
        latents_std=[0.9] * channels,
    ).eval()
