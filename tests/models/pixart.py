"""PixArt and DiT."""

from __future__ import annotations

import torch

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

TINY = {
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
            "hidden_states": randn(g, 2, 4, 6, 10),
            "timestep": STEPS,
            "encoder_hidden_states": randn(g, 2, 7, 8),
            "encoder_attention_mask": padding_mask(4),
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
            "hidden_states": randn(g, 2, 4, 6, 6),
            "timestep": STEPS,
            "class_labels": torch.tensor([0, 3]),
        },
    ),
}
