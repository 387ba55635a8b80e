"""Tiny transformers of diffusers with inputs: batch 2, odd token counts, real padding, 4 query heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_MODULE = "diffusers"


@dataclass(frozen=True)
class Tiny:
    """A class of diffusers by name, a configuration, and inputs by a generator."""

    kind: str
    config: dict[str, Any]
    inputs: Callable[[torch.Generator], dict[str, Any]] = field(repr=False)

    def build(self) -> nn.Module:
        """The model in float64 and eval mode, with nothing left at zero."""
        import diffusers

        torch.manual_seed(0)
        model = getattr(diffusers, self.kind)(**self.config).double().eval()
        for parameter in model.parameters():
            if not parameter.abs().sum():
                nn.init.normal_(parameter, std=0.02)
        return model

    def arguments(self) -> dict[str, Any]:
        """The same inputs on every rank."""
        return self.inputs(torch.Generator().manual_seed(1))


def with_short_text(arguments: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The same inputs with so many tokens of text; the second sample has but one."""
    short = dict(arguments)
    for name in ("encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_mask"):
        if name in short:
            short[name] = short[name][:, :tokens].clone()
            if "mask" in name:
                short[name][1, 1:] = 0
    if "txt_ids" in short:
        short["txt_ids"] = short["txt_ids"][..., :tokens, :]
    return short


def _randn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def _mask(kept: int, tokens: int = 7) -> Tensor:
    """The first sample keeps all text, the second only `kept` tokens."""
    return torch.tensor([[1] * tokens, [1] * kept + [0] * (tokens - kept)])


_TIMES = torch.tensor([0.3, 0.8], dtype=torch.float64)
_STEPS = torch.tensor([44, 239])
_WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 256,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}
_FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
}


def flux(text: int = 7) -> Tiny:
    """FLUX with a text of so many tokens."""
    return Tiny(
        "FluxTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
        lambda g: {
            "hidden_states": _randn(g, 2, 15, 4),
            "encoder_hidden_states": _randn(g, 2, text, 32),
            "pooled_projections": _randn(g, 2, 32),
            "img_ids": _randn(g, 15, 3),
            "txt_ids": _randn(g, text, 3),
            "timestep": _TIMES,
        },
    )


def wan(frames: int = 3) -> Tiny:
    """Wan on a video of so many latent frames, 15 tokens each."""
    return Tiny(
        "WanTransformer3DModel",
        _WAN,
        lambda g: {
            "hidden_states": _randn(g, 2, 4, frames, 6, 10),
            "encoder_hidden_states": _randn(g, 2, 7, 16),
            "timestep": _STEPS,
        },
    )


TINY: dict[str, Tiny] = {
    "flux": flux(),
    "flux_short_text": flux(2),
    "flux2": Tiny(
        "Flux2Transformer2DModel",
        {**_FLUX, "timestep_guidance_channels": 256, "axes_dims_rope": [4, 4, 4, 4]},
        lambda g: {
            "hidden_states": _randn(g, 2, 15, 4),
            "encoder_hidden_states": _randn(g, 2, 7, 32),
            "img_ids": _randn(g, 2, 15, 4),
            "txt_ids": _randn(g, 2, 7, 4),
            "timestep": _TIMES,
            "guidance": torch.ones(2, dtype=torch.float64),
        },
    ),
    "sd3": Tiny(
        "SD3Transformer2DModel",
        {
            "sample_size": 32,
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 64,
            "out_channels": 4,
            "pos_embed_max_size": 96,
            "dual_attention_layers": (0,),
            "qk_norm": None,
        },
        lambda g: {
            "hidden_states": _randn(g, 2, 4, 3, 5),
            "encoder_hidden_states": _randn(g, 2, 7, 32),
            "pooled_projections": _randn(g, 2, 64),
            "timestep": _STEPS,
        },
    ),
    "qwen_image": Tiny(
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 16,
            "guidance_embeds": False,
            "axes_dims_rope": (8, 4, 4),
        },
        lambda g: {
            "hidden_states": _randn(g, 2, 15, 16),
            "encoder_hidden_states": _randn(g, 2, 7, 16),
            "encoder_hidden_states_mask": _mask(4),
            "timestep": _TIMES,
            "img_shapes": [[(1, 3, 5)]] * 2,
        },
    ),
    "wan": wan(),
    "wan_per_token_timestep": Tiny(
        "WanTransformer3DModel",
        _WAN,
        lambda g: {**wan().inputs(g), "timestep": torch.randint(0, 900, (2, 45), generator=g)},
    ),
    "wan_image_to_video": Tiny(
        "WanTransformer3DModel",
        {**_WAN, "image_dim": 16, "added_kv_proj_dim": 48},
        lambda g: {
            "hidden_states": _randn(g, 2, 4, 3, 6, 10),
            "encoder_hidden_states": _randn(g, 2, 512, 16),
            "encoder_hidden_states_image": _randn(g, 2, 257, 16),
            "timestep": _STEPS,
        },
    ),
    "ltx": Tiny(
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "cross_attention_dim": 32,
            "num_layers": 2,
            "qk_norm": "rms_norm_across_heads",
            "caption_channels": 16,
        },
        lambda g: {
            "hidden_states": _randn(g, 2, 15, 4),
            "encoder_hidden_states": _randn(g, 2, 7, 16),
            "timestep": _STEPS,
            "encoder_attention_mask": _mask(4).bool(),
            "num_frames": 1,
            "height": 3,
            "width": 5,
        },
    ),
    "cogvideox": Tiny(
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": 8,
            "num_layers": 2,
            "sample_width": 10,
            "sample_height": 6,
            "sample_frames": 1,
            "patch_size": 2,
            "temporal_compression_ratio": 4,
            "max_text_seq_length": 7,
            "use_rotary_positional_embeddings": True,
        },
        lambda g: {
            "hidden_states": _randn(g, 2, 1, 4, 6, 10),
            "encoder_hidden_states": _randn(g, 2, 7, 8),
            "timestep": _STEPS,
            "image_rotary_emb": (_randn(g, 15, 8), _randn(g, 15, 8)),
        },
    ),
    "hunyuan_video": Tiny(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "patch_size_t": 1,
            "guidance_embeds": True,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
            "image_condition_type": None,
        },
        lambda g: {
            "hidden_states": _randn(g, 2, 4, 1, 3, 5),
            "timestep": _STEPS,
            "encoder_hidden_states": _randn(g, 2, 7, 16),
            "pooled_projections": _randn(g, 2, 8),
            "encoder_attention_mask": _mask(4).double(),
            "guidance": torch.tensor([4.0, 4.0], dtype=torch.float64),
        },
    ),
    "pixart": Tiny(
        "PixArtTransformer2DModel",
        {
            "sample_size": 8,
            "num_layers": 2,
            "patch_size": 2,
            "attention_head_dim": 2,
            "num_attention_heads": 4,
            "in_channels": 4,
            "cross_attention_dim": 8,
            "out_channels": 8,
            "attention_bias": True,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 8,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "norm_eps": 1e-6,
            "use_additional_conditions": False,
            "caption_channels": None,
        },
        lambda g: {
            "hidden_states": _randn(g, 2, 4, 6, 10),
            "timestep": _STEPS,
            "encoder_hidden_states": _randn(g, 2, 7, 8),
            "encoder_attention_mask": _mask(4),
            "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
        },
    ),
    "dit": Tiny(
        "DiTTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 8,
            "activation_fn": "gelu-approximate",
            "num_attention_heads": 4,
            "attention_head_dim": 4,
            "attention_bias": True,
            "num_layers": 2,
            "norm_type": "ada_norm_zero",
            "num_embeds_ada_norm": 8,
            "patch_size": 2,
            "sample_size": 6,
        },
        lambda g: {
            "hidden_states": _randn(g, 2, 4, 6, 6),
            "timestep": _STEPS,
            "class_labels": torch.tensor([0, 3]),
        },
    ),
}

_HELIOS_HISTORY = {"short": 1, "mid": 1, "long": 4}


def _helios(g: torch.Generator) -> dict[str, Any]:
    inputs = {
        "hidden_states": _randn(g, 2, 4, 2, 6, 10),
        "encoder_hidden_states": _randn(g, 2, 7, 16),
        "timestep": _STEPS,
        "indices_hidden_states": torch.ones(2, 2),
    }
    for name, frames in _HELIOS_HISTORY.items():
        inputs[f"indices_latents_history_{name}"] = torch.ones(2, frames)
        inputs[f"latents_history_{name}"] = _randn(g, 2, 4, frames, 8, 8)
    return inputs


def _minimax_h3(g: torch.Generator) -> dict[str, Any]:
    text, audio, video = torch.arange(4), torch.arange(4, 10), torch.arange(10, 19)
    place = torch.cat([torch.zeros(10, 2), torch.tensor([[i // 3, i % 3] for i in range(9)])])
    return {
        "hidden_states": _randn(g, 2, 9, 16),
        "audio_hidden_states": _randn(g, 2, 6, 6),
        "encoder_hidden_states": _randn(g, 2, 4, 8),
        "timestep": torch.tensor([0.7, 0.3], dtype=torch.float64),
        "timestep_indices": torch.tensor([0] * 4 + [1] * 6 + [0] * 9),
        "token_tags": torch.tensor([1] * 4 + [2] * 6 + [0] * 9),
        "position_ids": torch.cat([torch.arange(19)[:, None], place], 1).double(),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


THEIR_PLANS: dict[str, Tiny] = {
    **{name: TINY[name] for name in ("flux", "flux2", "qwen_image", "wan", "wan_per_token_timestep", "ltx")},
    "wan_image_to_video": TINY["wan_image_to_video"],
    "chronoedit": Tiny(
        "ChronoEditTransformer3DModel",
        {**_WAN, "rope_temporal_skip_len": 8},
        lambda g: {**wan().inputs(g), "hidden_states": _randn(g, 2, 4, 2, 6, 10)},
    ),
    "helios": Tiny(
        "HeliosTransformer3DModel",
        {
            **{name: value for name, value in _WAN.items() if name != "rope_max_seq_len"},
            "num_layers": 40,  # the plan names this many
            "rope_dim": (4, 4, 4),
            "has_multi_term_memory_patch": True,
            "guidance_cross_attn": True,
            "zero_history_timestep": True,
            "is_amplify_history": False,
        },
        _helios,
    ),
    "ltx2": Tiny(
        "LTX2VideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 1,
            "patch_size_t": 1,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "cross_attention_dim": 32,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 4,
            "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 16,
            "num_layers": 2,
            "qk_norm": "rms_norm_across_heads",
            "caption_channels": 16,
            "rope_double_precision": False,
        },
        lambda g: {
            "hidden_states": _randn(g, 2, 30, 4),
            "audio_hidden_states": _randn(g, 2, 9, 4),
            "encoder_hidden_states": _randn(g, 2, 7, 16),
            "audio_encoder_hidden_states": _randn(g, 2, 7, 16),
            "timestep": _STEPS,
            "encoder_attention_mask": _mask(4).bool(),
            "num_frames": 2,
            "height": 3,
            "width": 5,
            "audio_num_frames": 9,
            "fps": 25.0,
            "isolate_modalities": True,  # their plan leaves cross_attn_rope whole, which only this does not use
        },
    ),
    "minimax_h3": Tiny(
        "MiniMaxH3Transformer3DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 2,
            "ffn_dim": 32,
            "in_channels": 4,
            "audio_in_channels": 6,
            "patch_size": (1, 2, 2),
            "text_dim": 8,
            "freq_dim": 8,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        _minimax_h3,
    ),
}
