"""Tiny autoencoders of audio."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderOobleck,
    AutoencoderSAME,
    LongCatAudioDiTVae,
    MMAudioVAE,
    MMAudioVocoder,
)


def oobleck(channels: int = 4, rate: int = 4) -> AutoencoderOobleck:
    """Stable Audio's: two samples of sound to one of latents, with `rate` samples a second."""
    vae = AutoencoderOobleck(
        encoder_hidden_size=2 * channels,
        downsampling_ratios=[1, 2],
        decoder_channels=4,
        decoder_input_channels=channels,
        channel_multiples=[2, 4],
        sampling_rate=rate,
    )
    return vae.eval()


def same(channels: int = 4) -> AutoencoderSAME:
    """Stable Audio 3's: four samples of sound to one of latents, with 16 samples a second."""
    vae = AutoencoderSAME(
        patch_size=2,
        encoder_channels=8,
        encoder_c_mults=(2,),
        encoder_strides=(2,),
        encoder_transformer_depths=(1,),
        latent_dim=channels,
        use_differential_attention=False,
        dim_heads=4,
        ff_mult=2,
        sampling_rate=16,
    )
    return vae.eval()


def longcat(channels: int = 4) -> LongCatAudioDiTVae:
    """LongCat's: two samples of sound to one of latents, with 100 samples a second."""
    vae = LongCatAudioDiTVae(
        channels=16,
        c_mults=[1, 2],
        strides=[2],
        latent_dim=channels,
        encoder_latent_dim=2 * channels,
        downsampling_ratio=2,
        sample_rate=100,
    )
    return vae.eval()


def ltx2() -> AutoencoderKLLTX2Audio:
    """LTX-2's: 25 latents a second, of two channels and two bins."""
    vae = AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        mel_bins=8,
    )
    vae.latents_mean.copy_(0.1 * torch.arange(4))
    vae.latents_std.copy_(0.5 + 0.1 * torch.arange(4))
    return vae.eval()


def mmaudio(channels: int = 4) -> MMAudioVAE:
    """MMAudio's: 43 latents a second."""
    vae = MMAudioVAE(mel_bins=8, latent_channels=channels, hidden_channels=8, layers_per_block=1)
    return vae.eval()


def mmaudio_vocoder() -> MMAudioVocoder:
    """It makes sound of MMAudio's spectra of 8 bins."""
    vocoder = MMAudioVocoder(
        num_mels=8,
        upsample_initial_channel=8,
        upsample_rates=(2, 2),
        upsample_kernel_sizes=(4, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3, 5),),
    )
    return vocoder.eval()
