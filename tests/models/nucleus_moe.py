"""Nucleus-Image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.tiny import TIMES, Tiny, padding_mask, randn


class _WithExperts(Tiny):
    """Initialise the experts' weights, which the class leaves uninitialised."""

    def build(self) -> nn.Module:
        model = super().build()
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                nn.init.normal_(parameter, std=0.2)
        return model


def _nucleus(text: int = 7, masked: bool = True, **config: Any) -> Tiny:
    def inputs(g: torch.Generator) -> dict[str, Any]:
        return {
            "hidden_states": randn(g, 2, 15, 16),
            "encoder_hidden_states": randn(g, 2, text, 16),
            "encoder_hidden_states_mask": padding_mask(text // 2, text) if masked else None,
            "timestep": TIMES,
            "img_shapes": [(1, 3, 5)] * 2,
        }

    return _WithExperts(
        "NucleusMoEImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
            "num_experts": 4,
            "moe_intermediate_dim": 16,
            "capacity_factors": 1.5,
            "dense_moe_strategy": "leave_first_block_dense",
            **config,
        },
        inputs,
    )


TINY = {
    "nucleus_moe": _nucleus(),
    "nucleus_moe_short_text": _nucleus(text=2, masked=False, num_layers=2, use_sigmoid=True),
    "nucleus_moe_dense": _nucleus(moe_enabled=False, num_layers=2),
}
