"""CogView3-Plus and CogView4."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

_COGVIEW = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "text_embed_dim": 8,
    "time_embed_dim": 8,
    "condition_dim": 4,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}


class _Training(Tiny):
    def build(self) -> nn.Module:
        """A model with the processors meant for training."""
        from diffusers.models.transformers.transformer_cogview4 import CogView4TrainingAttnProcessor

        model = super().build()
        for block in model.transformer_blocks:
            block.attn1.set_processor(CogView4TrainingAttnProcessor())
        return model


def _picture(g: torch.Generator, text: int = 7) -> dict[str, Any]:
    return {
        "hidden_states": randn(g, 2, 4, 10, 14),
        "encoder_hidden_states": randn(g, 2, text, 8),
        "timestep": STEPS,
        "original_size": torch.tensor([[64, 48], [32, 80]]),
        "target_size": torch.tensor([[40, 56], [40, 56]]),
        "crop_coords": torch.tensor([[0, 0], [3, 5]]),
    }


TINY = {
    "cogview3_plus": Tiny("CogView3PlusTransformer2DModel", _COGVIEW, _picture),
    "cogview4": Tiny("CogView4Transformer2DModel", _COGVIEW, lambda g: _picture(g, text=2)),
    "cogview4_masked": Tiny(
        "CogView4Transformer2DModel",
        _COGVIEW,
        lambda g: {
            **_picture(g),
            "attention_mask": padding_mask(4),
            "image_rotary_emb": (randn(g, 35, 8), randn(g, 35, 8)),
        },
    ),
    "cogview4_training": _Training(
        "CogView4Transformer2DModel",
        _COGVIEW,
        lambda g: {
            **_picture(g),
            "attention_kwargs": {
                "text_attn_mask": padding_mask(4).int(),
                "latent_attn_mask": padding_mask(31, 35).int(),
            },
        },
    ),
}
