"""Tiny VAEs of diffusers, with random weights, for the tests of vae/."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor


@dataclass(frozen=True)
class TinyVae:
    """A tiny VAE: its class and settings, a latent and an image or video of odd sizes, small tiles, attributes."""

    of: str
    settings: dict[str, Any]
    latent: tuple[int, ...]
    sample: tuple[int, ...]
    tiles: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    modes: str = "tiles halos"
    broken: str = ""  # in diffusers itself
    whole: str = ""  # computed by every rank


_TILES = {f"tile_sample_{key}": n for key, n in (("min_height", 24), ("min_width", 24))}
_STRIDES = {**_TILES, "tile_sample_stride_height": 16, "tile_sample_stride_width": 16}
_LONG = {**_STRIDES, "tile_sample_min_num_frames": 12, "tile_sample_stride_num_frames": 8}
_BLOCKS = {"block_out_channels": (8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
_TYPES = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
_KL = {**_BLOCKS, **_TYPES, "sample_size": 24}
_QWEN = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True]}
_WAN = {**_QWEN, "scale_factor_spatial": 4}
_WAN22 = {
    **_WAN,
    "scale_factor_spatial": 8,
    "patch_size": 2,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
}
_LTX = {
    "latent_channels": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("LTXVideoDownBlock3D",) * 2,
    "decoder_block_out_channels": (8, 16),
    "layers_per_block": (1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1),
    "spatio_temporal_scaling": (True, False),
    "decoder_spatio_temporal_scaling": (True, False),
    "decoder_inject_noise": (False, False, False),
    "downsample_type": ("conv", "conv"),
    "upsample_residual": (False, False),
    "upsample_factor": (1, 1),
    "patch_size": 2,
}
_LTX095 = {
    **_LTX,
    "block_out_channels": (8, 16, 32),
    "down_block_types": ("LTXVideo095DownBlock3D",) * 2,
    "spatio_temporal_scaling": (True, True),
    "decoder_spatio_temporal_scaling": (True, True),
    "decoder_block_out_channels": (8, 16),
    "downsample_type": ("spatial", "spatiotemporal"),
    "upsample_residual": (True, True),
    "upsample_factor": (2, 2),
}
_LTX2 = {
    **_LTX095,
    "block_out_channels": (8, 16),
    "down_block_types": ("LTX2VideoDownBlock3D",) * 2,
    "upsample_type": ("spatiotemporal", "spatiotemporal"),
}
_HUNYUAN = {
    **_BLOCKS,
    "down_block_types": ("HunyuanVideoDownBlock3D",) * 3,
    "up_block_types": ("HunyuanVideoUpBlock3D",) * 3,
    "spatial_compression_ratio": 4,
}
_COG = {
    **_BLOCKS,
    "down_block_types": ("CogVideoXDownBlock3D",) * 3,
    "up_block_types": ("CogVideoXUpBlock3D",) * 3,
    "sample_height": 48,
    "sample_width": 48,
}
_HUNYUAN_IMAGE = {
    **{"in_channels": 3, "out_channels": 3, "latent_channels": 16, "block_out_channels": (32, 32, 64)},
    **{"layers_per_block": 1, "spatial_compression_ratio": 4, "sample_size": 24},
}
_HUNYUAN15 = {"latent_channels": 4, "block_out_channels": (8, 16, 32), "layers_per_block": 1}
_DC = {
    **{"latent_channels": 8, "attention_head_dim": 4},
    **{
        f"{part}_block_types": ("ResBlock", "EfficientViTBlock", "EfficientViTBlock") for part in ("encoder", "decoder")
    },
    **{f"{part}_block_out_channels": (8, 8, 16) for part in ("encoder", "decoder")},
    **{f"{part}_layers_per_block": (1, 1, 1) for part in ("encoder", "decoder")},
    **{f"{part}_qkv_multiscales": ((), (), (5,)) for part in ("encoder", "decoder")},
}
_MAGVIT = {
    **_BLOCKS,
    "down_block_types": ("SpatialDownBlock3D", "SpatialTemporalDownBlock3D", "SpatialTemporalDownBlock3D"),
    "up_block_types": ("SpatialUpBlock3D", "SpatialTemporalUpBlock3D", "SpatialTemporalUpBlock3D"),
}
_MOCHI = {
    **{f"{part}_block_out_channels": (32, 32, 64) for part in ("encoder", "decoder")},
    **{"in_channels": 15, "latent_channels": 4, "layers_per_block": (1, 1, 1), "temporal_expansions": (1, 2)},
    **{"spatial_expansions": (2, 2), "add_attention_block": (False, True, True)},
    **{"latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4},
}
_ALLEGRO = {
    **_BLOCKS,
    "down_block_types": ("AllegroDownBlock3D",) * 3,
    "up_block_types": ("AllegroUpBlock3D",) * 3,
    "temporal_downsample_blocks": (True, False, False),
    "temporal_upsample_blocks": (False, True, False),
    "temporal_compression_ratio": 2,
}
QUICK = {
    "kl": TinyVae("AutoencoderKL", _KL, (2, 4, 13, 11), (2, 3, 53, 45)),
    "wan": TinyVae("AutoencoderKLWan", _WAN, (2, 4, 3, 13, 11), (2, 3, 9, 52, 44), _STRIDES),
    "qwen": TinyVae("AutoencoderKLQwenImage", _QWEN, (2, 4, 1, 11, 13), (2, 3, 1, 44, 53), _STRIDES),
    "ltx": TinyVae("AutoencoderKLLTXVideo", _LTX, (2, 8, 3, 13, 11), (2, 3, 5, 52, 44), _STRIDES),
    "hunyuan": TinyVae("AutoencoderKLHunyuanVideo", _HUNYUAN, (2, 4, 4, 13, 11), (2, 3, 13, 53, 44), _LONG),
    "magvit": TinyVae("AutoencoderKLMagvit", _MAGVIT, (2, 4, 3, 13, 11), (2, 3, 9, 52, 44), _STRIDES),
    "mochi": TinyVae(
        "AutoencoderKLMochi", _MOCHI, (2, 4, 3, 13, 11), (2, 3, 6, 52, 44), _STRIDES, whole="halos encode"
    ),
}
MORE = {
    "flux2": TinyVae("AutoencoderKLFlux2", _KL, (2, 4, 13, 17), (2, 3, 53, 67)),
    "kl without attention": TinyVae(
        "AutoencoderKL",
        {**_KL, "mid_block_add_attention": False, "use_quant_conv": False, "use_post_quant_conv": False},
        (1, 4, 11, 14),
        (1, 3, 45, 60),
    ),
    "wan 2.2": TinyVae("AutoencoderKLWan", _WAN22, (1, 4, 2, 13, 11), (1, 3, 5, 104, 88), _STRIDES),
    "qwen video": TinyVae("AutoencoderKLQwenImage", _QWEN, (1, 4, 3, 11, 13), (1, 3, 5, 44, 53), _STRIDES),
    "qwen 2.1": TinyVae(
        "AutoencoderKLQwenImage21",
        {**_WAN, "decoder_base_dim": 4, "in_channels": 3, "out_channels": 3},
        (2, 4, 1, 13, 11),
        (2, 3, 1, 52, 44),
        _STRIDES,
    ),
    "ltx long": TinyVae(
        "AutoencoderKLLTXVideo", _LTX, (1, 8, 8, 13, 11), (1, 3, 17, 52, 44), _LONG, {"use_framewise_decoding": True}
    ),
    "ltx 0.9.5": TinyVae("AutoencoderKLLTXVideo", _LTX095, (1, 8, 3, 13, 11), (1, 3, 9, 104, 88), _STRIDES),
    "ltx2": TinyVae("AutoencoderKLLTX2Video", _LTX2, (1, 8, 3, 14, 12), (1, 3, 9, 112, 96), _STRIDES),
    "hunyuan image": TinyVae("AutoencoderKLHunyuanVideo", _HUNYUAN, (1, 4, 1, 9, 13), (1, 3, 1, 36, 55), _STRIDES),
    "hunyuan 1.5": TinyVae(
        "AutoencoderKLHunyuanVideo15",
        {**_HUNYUAN15, "spatial_compression_ratio": 4},
        (1, 4, 3, 13, 11),
        (1, 3, 9, 52, 44),
        {**_TILES, "tile_latent_min_height": 6, "tile_latent_min_width": 6},
    ),
    "hunyuanimage": TinyVae(
        "AutoencoderKLHunyuanImage", _HUNYUAN_IMAGE, (2, 16, 13, 11), (2, 3, 52, 44), broken="tiles encode"
    ),
    "cogvideox": TinyVae("AutoencoderKLCogVideoX", _COG, (2, 4, 5, 13, 11), (2, 3, 9, 52, 44), _TILES, modes="tiles"),
    "magvit of all frames": TinyVae(
        *("AutoencoderKLMagvit", {**_MAGVIT, "spatial_group_norm": False}, (1, 4, 3, 11, 13), (1, 3, 9, 44, 52)),
        _STRIDES,
    ),
    "allegro": TinyVae(
        *("AutoencoderKLAllegro", _ALLEGRO, (1, 4, 6, 14, 10), (1, 3, 12, 56, 40)),
        attributes={"kernel": (8, 24, 24), "stride": (4, 16, 16)},
        modes="tiles",
    ),
    "dc": TinyVae("AutoencoderDC", _DC, (2, 8, 13, 11), (2, 3, 52, 44), _STRIDES, modes="tiles"),
}
ALL = {**QUICK, **MORE}


def _norm(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def make_vae(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights on every rank, none of them zero or one."""
    torch.manual_seed(5)
    vae = getattr(diffusers, ALL[name].of)(**ALL[name].settings).to(dtype).eval()
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    for module in vae.modules():
        if type(module).__name__ == "RMSNorm" and dtype == torch.float64:  # rounds to float32 whatever it is given
            module.forward = partial(_norm, eps=module.eps)
    for attribute, value in ALL[name].attributes.items():
        setattr(vae, attribute, value)
    return vae
