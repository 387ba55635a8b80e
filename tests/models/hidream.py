"""HiDream."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.models.tiny import STEPS, Tiny, randn

_HIDREAM = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "caption_channels": [12, 10],
    "text_emb_dim": 8,
    "num_routed_experts": 3,
    "num_activated_experts": 2,
    "axes_dims_rope": (4, 2, 2),
    "max_resolution": (10, 14),
    "llama_layers": (0, 2, 1, 1),
}


def hidream(height: int, width: int, *, t5: int = 7, llama: int = 5, experts: int = 3) -> Tiny:
    """HiDream on latents of this size, with texts of so many tokens."""
    return Tiny(
        "HiDreamImageTransformer2DModel",
        {**_HIDREAM, "num_routed_experts": experts},
        lambda g: {
            "hidden_states": randn(g, 2, 4, height, width),
            "encoder_hidden_states_t5": randn(g, 2, t5, 12),
            "encoder_hidden_states_llama3": randn(g, 3, 2, llama, 10),
            "pooled_embeds": randn(g, 2, 8),
            "timesteps": STEPS,
        },
    )


TINY = {
    "hidream": hidream(10, 10),
    "hidream_training": replace(hidream(10, 10), training=True),  # experts have gradients only there
    "hidream_not_square": hidream(6, 10, experts=0),  # padded to 35 tokens and masked
    "hidream_short_text": hidream(10, 10, t5=2, llama=2),
    "hidream_tokens": Tiny(
        "HiDreamImageTransformer2DModel",
        _HIDREAM,
        lambda g: {
            **hidream(10, 10).inputs(g),
            "hidden_states": randn(g, 2, 17, 16),
            "hidden_states_masks": torch.tensor([[1.0] * 15 + [0.0] * 2, [1.0] * 9 + [0.0] * 8]).double(),
            "img_ids": randn(g, 2, 17, 3),
            "img_sizes": torch.tensor([[3, 5], [3, 5]]),
            "encoder_hidden_states_llama3": [randn(g, 2, 5, 10) for _ in range(3)],
        },
    ),
}
