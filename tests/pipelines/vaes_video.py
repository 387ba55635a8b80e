"""Tiny autoencoders of videos."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLAllegro,
    AutoencoderKLCogVideoX,
    AutoencoderKLCosmos,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLMagvit,
    AutoencoderKLMochi,
    AutoencoderKLWan,
)


def wan(channels: int = 4) -> AutoencoderKLWan:
    """Wan's: 4 frames of video to one of latents, 8 pixels to one."""
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1 * i for i in range(channels)],
        latents_std=[0.1 + 0.01 * i for i in range(channels)],  # small: so pictures differ much in latents
    ).eval()


def ltx(channels: int = 4, **others: Any) -> AutoencoderKLLTXVideo:
    """LTX-Video's: 8 frames of video to one of latents, 32 pixels to one."""
    vae = AutoencoderKLLTXVideo(
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        **others,
    )
    return _with_statistics(vae)


def ltx2(channels: int = 4) -> AutoencoderKLLTX2Video:
    """LTX-2's: 8 frames of video to one of latents, 32 pixels to one."""
    vae = AutoencoderKLLTX2Video(
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    return _with_statistics(vae)


def _with_statistics(vae: Any) -> Any:
    """Set the mean and the standard deviation of the latents, which these autoencoders have as buffers."""
    channels = torch.arange(len(vae.latents_mean))
    vae.latents_mean.copy_(0.1 * channels)
    vae.latents_std.copy_(0.1 + 0.01 * channels)
    return vae.eval()


def hunyuan_video(channels: int = 4) -> AutoencoderKLHunyuanVideo:
    """HunyuanVideo's: 4 frames of video to one of latents, 8 pixels to one."""
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=3.0,
    )
    return vae.eval()


def hunyuan_video15(channels: int = 4) -> AutoencoderKLHunyuanVideo15:
    """HunyuanVideo 1.5's: 2 frames of video to one of latents, 4 pixels to one."""
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=channels,
        block_out_channels=(16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    return vae.eval()


def cogvideox(channels: int = 4) -> AutoencoderKLCogVideoX:
    """CogVideoX's: 4 frames of video to one of latents, 8 pixels to one."""
    vae = AutoencoderKLCogVideoX(
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
    )
    return vae.eval()


def mochi(channels: int = 12) -> AutoencoderKLMochi:
    """Mochi's: 6 frames of video to one of latents, 8 pixels to one."""
    vae = AutoencoderKLMochi(
        latent_channels=channels,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    return vae.eval()


def cosmos(channels: int = 4) -> AutoencoderKLCosmos:
    """Cosmos's: 4 frames of video to one of latents, 8 pixels to one."""
    vae = AutoencoderKLCosmos(
        latent_channels=channels,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )
    return vae.eval()


def allegro(channels: int = 4) -> AutoencoderKLAllegro:
    """Allegro's: 4 frames of video to one of latents, 8 pixels to one."""
    vae = AutoencoderKLAllegro(
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
    )
    return vae.eval()


def magvit(channels: int = 4) -> AutoencoderKLMagvit:
    """EasyAnimate's: 4 frames of video to one of latents, 8 pixels to one."""
    vae = AutoencoderKLMagvit(
        latent_channels=channels,
        down_block_types=(
            "SpatialDownBlock3D",
            "SpatialTemporalDownBlock3D",
            "SpatialTemporalDownBlock3D",
            "SpatialTemporalDownBlock3D",
        ),
        up_block_types=(
            "SpatialUpBlock3D",
            "SpatialTemporalUpBlock3D",
            "SpatialTemporalUpBlock3D",
            "SpatialTemporalUpBlock3D",
        ),
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        spatial_group_norm=False,
    )
    return vae.eval()
