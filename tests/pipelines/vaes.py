"""Tiny autoencoders, none of them trained."""

from __future__ import annotations

from typing import Any

import diffusers
import torch


def _made(kind: str, **config: Any) -> Any:
    return getattr(diffusers, kind)(**config).eval()


def _with_statistics(vae: Any, least: float = 0.1, step: float = 0.01) -> Any:
    """Set the mean and the standard deviation of the latents, which these autoencoders have as buffers."""
    channels = torch.arange(len(vae.latents_mean))
    vae.latents_mean.copy_(0.1 * channels)
    vae.latents_std.copy_(least + step * channels)
    return vae


# images: a level halves height and width


def _kl(kind: str, channels: int, levels: int, width: int, **others: Any) -> Any:
    return _made(
        kind,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(width,) * levels,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=1,
        sample_size=32,
        mid_block_add_attention=False,
        **others,
    )


def kl(channels: int = 4, *, levels: int = 4, width: int = 4, quant: bool = False) -> Any:
    """AutoencoderKL with so many latent channels, which makes images 2 ** (levels - 1) times smaller."""
    others = {"use_quant_conv": quant, "use_post_quant_conv": quant, "scaling_factor": 1.5, "shift_factor": 0.06}
    return _kl("AutoencoderKL", channels, levels, width, **others)


def flux2(channels: int = 4) -> Any:
    """AutoencoderKLFlux2, which makes images 8 times smaller; its statistics differ by channel."""
    vae = _kl("AutoencoderKLFlux2", channels, levels=4, width=4)
    vae.bn.running_mean.copy_(torch.linspace(-0.3, 0.4, 4 * channels))
    vae.bn.running_var.copy_(torch.linspace(0.5, 1.5, 4 * channels))
    return vae


def _causal(kind: str, width: int, channels: int, levels: int, std: float, **others: Any) -> Any:
    """An autoencoder of Wan's form, with images for its videos."""
    sizes = {"base_dim": width, "z_dim": channels, "dim_mult": [1] * (levels + 1), "num_res_blocks": 1}
    statistics = {"latents_mean": [0.0] * channels, "latents_std": [std] * channels}
    return _made(kind, **{**sizes, "temperal_downsample": [False] * levels, **statistics, **others})


def qwen_image(channels: int = 4, *, levels: int = 2, blocks: int = 1) -> Any:
    """AutoencoderKLQwenImage (causal, of videos), which makes images 2 ** levels times smaller."""
    others = {"num_res_blocks": blocks, "latents_mean": [0.1] * channels}
    return _causal("AutoencoderKLQwenImage", 2, channels, levels, 0.9, **others)


def qwen_image21(channels: int = 8) -> Any:
    """AutoencoderKLQwenImage21 (causal, of videos, with an alpha channel), which makes images 16 times smaller."""
    others = {"decoder_base_dim": 2, "latents_mean": [0.1] * channels}
    return _causal("AutoencoderKLQwenImage21", 2, channels, 4, 0.9, **others)


def wan_patches(levels: int, patch: int, std: float, **others: Any) -> Any:
    """AutoencoderKLWan for images, with patches of pixels."""
    pixels = 3 * patch**2
    sizes = {"in_channels": pixels, "out_channels": pixels, "patch_size": patch}
    return _causal("AutoencoderKLWan", 4, 4, levels, std, **sizes, **others)


def dc() -> Any:
    """AutoencoderDC, which makes images 32 times smaller; its last level has attention."""
    levels = 6
    sizes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sizes[f"{side}_block_types"] = ("ResBlock",) * (levels - 1) + ("EfficientViTBlock",)
        sizes[f"{side}_block_out_channels"] = (8,) * levels
        sizes[f"{side}_layers_per_block"] = (1,) * levels
        sizes[f"{side}_qkv_multiscales"] = ((),) * (levels - 1) + ((5,),)
    kinds = {"downsample_block_type": "conv", "upsample_block_type": "interpolate"}
    others = {"in_channels": 3, "latent_channels": 4, "attention_head_dim": 2, "scaling_factor": 0.41}
    return _made("AutoencoderDC", **sizes, **kinds, **others)


def hunyuan_image() -> Any:
    """AutoencoderKLHunyuanImage, which makes images 8 times smaller. (Its norms have 32 groups.)"""
    sizes = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32,) * 4}
    others = {"layers_per_block": 1, "spatial_compression_ratio": 8, "sample_size": 32, "scaling_factor": 0.75}
    return _made("AutoencoderKLHunyuanImage", **sizes, **others)


# videos: 4 frames and 8 pixels to one of latents, if not said otherwise

_VIDEO = {"latent_channels": 4, "block_out_channels": (8,) * 4, "layers_per_block": 1}


def wan() -> Any:
    """Wan's. Its deviations are small: so pictures differ much in latents."""
    statistics = {"latents_mean": [0.1 * i for i in range(4)], "latents_std": [0.1 + 0.01 * i for i in range(4)]}
    return _causal("AutoencoderKLWan", 4, 4, 3, 1.0, **{"temperal_downsample": [False, True, True], **statistics})


def ltx(**others: Any) -> Any:
    """LTX-Video's: 8 frames, 32 pixels."""
    layers = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5}
    sizes = {**_VIDEO, "decoder_block_out_channels": (8,) * 4, **layers}
    return _with_statistics(_made("AutoencoderKLLTXVideo", **sizes, **others))


def ltx2() -> Any:
    """LTX-2's: 8 frames, 32 pixels."""
    layers = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4}
    ratios = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    sizes = {**_VIDEO, "decoder_block_out_channels": (8, 16, 32), **layers, **ratios}
    return _with_statistics(_made("AutoencoderKLLTX2Video", **sizes))


def hunyuan_video() -> Any:
    """HunyuanVideo's."""
    return _made("AutoencoderKLHunyuanVideo", **_VIDEO, norm_num_groups=4, scaling_factor=3.0)


def hunyuan_video15() -> Any:
    """HunyuanVideo 1.5's: 2 frames, 4 pixels."""
    ratios = {"spatial_compression_ratio": 4, "temporal_compression_ratio": 2}
    others = {"downsample_match_channel": False, "upsample_match_channel": False}
    return _made("AutoencoderKLHunyuanVideo15", **{**_VIDEO, "block_out_channels": (16, 16)}, **ratios, **others)


def cogvideox() -> Any:
    """CogVideoX's."""
    return _made("AutoencoderKLCogVideoX", **_VIDEO, norm_num_groups=2)


def mochi() -> Any:
    """Mochi's: 6 frames, 8 pixels."""
    sizes = {f"{x}_block_out_channels": (32,) * 4 for x in ("encoder", "decoder")}
    return _made("AutoencoderKLMochi", latent_channels=12, **sizes, layers_per_block=(1,) * 5)


def cosmos() -> Any:
    """Cosmos's."""
    sizes = {f"{x}_block_out_channels": (8,) * 4 for x in ("encoder", "decode")}
    ratios = {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
    others = {"latent_channels": 4, "attention_resolutions": (8,), "resolution": 64, "num_layers": 1}
    return _made("AutoencoderKLCosmos", **sizes, **ratios, **others)


def allegro() -> Any:
    """Allegro's."""
    return _made("AutoencoderKLAllegro", **_VIDEO, norm_num_groups=2)


def magvit() -> Any:
    """EasyAnimate's."""
    kinds = {
        f"{x.lower()}_block_types": (f"Spatial{x}Block3D", *[f"SpatialTemporal{x}Block3D"] * 3) for x in ("Down", "Up")
    }
    return _made("AutoencoderKLMagvit", **_VIDEO, **kinds, norm_num_groups=2, spatial_group_norm=False)


def minimax_h3() -> Any:
    """MiniMax-H3's: 8 pixels, and 17 frames to 5."""
    factors = {"spatial_downsample_factors": (2, 2, 2), "temporal_downsample_factors": (1, 2, 2)}
    decoder = {"decoder_num_layers": 1, "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 8}
    statistics = {"latents_mean": (0.1, -0.2, 0.3, 0.0), "latents_std": (0.5, 1.5, 0.8, 1.2)}
    sizes = {**_VIDEO, "block_out_channels": (8,) * 3, "norm_num_groups": 4}
    return _made("AutoencoderKLMiniMaxH3", **sizes, **factors, **decoder, **statistics)


# sound


def oobleck(rate: int = 4) -> Any:
    """Stable Audio's: two samples of sound to one of latents, with `rate` samples a second."""
    sizes = {"encoder_hidden_size": 8, "decoder_channels": 4, "decoder_input_channels": 4}
    factors = {"downsampling_ratios": [1, 2], "channel_multiples": [2, 4]}
    return _made("AutoencoderOobleck", **sizes, **factors, sampling_rate=rate)


def same() -> Any:
    """Stable Audio 3's: four samples of sound to one of latents, with 16 samples a second."""
    encoder = {"channels": 8, "c_mults": (2,), "strides": (2,), "transformer_depths": (1,)}
    sizes = {"patch_size": 2, "latent_dim": 4, "dim_heads": 4, "ff_mult": 2, "sampling_rate": 16}
    encoder = {f"encoder_{name}": value for name, value in encoder.items()}
    return _made("AutoencoderSAME", **sizes, **encoder, use_differential_attention=False)


def longcat() -> Any:
    """LongCat's: two samples of sound to one of latents, with 100 samples a second."""
    sizes = {"channels": 16, "c_mults": [1, 2], "strides": [2], "latent_dim": 4, "encoder_latent_dim": 8}
    return _made("LongCatAudioDiTVae", **sizes, downsampling_ratio=2, sample_rate=100)


def ltx2_audio() -> Any:
    """LTX-2's: 25 latents a second, of two channels and two bins."""
    sizes = {"base_channels": 4, "output_channels": 2, "ch_mult": (1, 1, 1), "num_res_blocks": 1, "in_channels": 2}
    sound = {"latent_channels": 2, "resolution": 32, "sample_rate": 16000, "mel_hop_length": 160, "mel_bins": 8}
    others = {"attn_resolutions": None, "norm_type": "pixel", "causality_axis": "height"}
    vae = _made("AutoencoderKLLTX2Audio", **sizes, **sound, **others, mid_block_add_attention=False)
    return _with_statistics(vae, 0.5, 0.1)


def ltx2_vocoder() -> Any:
    """It makes sound of LTX-2's spectra."""
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    upsampling = {"upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]}
    others = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]], "output_sampling_rate": 16000}
    return LTX2Vocoder(in_channels=16, hidden_channels=8, **upsampling, **others).eval()


def mmaudio() -> Any:
    """MMAudio's: 43 latents a second."""
    return _made("MMAudioVAE", mel_bins=8, latent_channels=6, hidden_channels=8, layers_per_block=1)


def mmaudio_vocoder() -> Any:
    """It makes sound of MMAudio's spectra of 8 bins."""
    upsampling = {"upsample_initial_channel": 8, "upsample_rates": (2, 2), "upsample_kernel_sizes": (4, 4)}
    blocks = {"resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1, 3, 5),)}
    return _made("MMAudioVocoder", num_mels=8, **upsampling, **blocks)


def minimax_h3_audio() -> Any:
    """MiniMax-H3's: 40 latents a second, as the pipeline expects, of 8,000 samples."""
    encoder = {"encoder_dim": 2, "encoder_rates": (5, 5, 8)}
    decoder = {"decoder_dim": 8, "decoder_rates": (5, 5, 8), "decoder_kernel_sizes": (9, 9, 16)}
    blocks = {"resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1, 3),)}
    sizes = {"latent_dim": 12, "latent_channels": 6, "num_attention_heads": 2, "sampling_rate": 8000}
    statistics = {"latents_mean": [0.1, 0.0, -0.1, 0.2, 0.0, -0.3], "latents_std": [0.7, 1.1, 0.9, 1.3, 0.6, 1.0]}
    return _made("AutoencoderKLMiniMaxH3Audio", **encoder, **decoder, **blocks, **sizes, **statistics)
