"""Wan."""

from __future__ import annotations

import torch

from tests.models.tiny import STEPS, Tiny, randn

WAN = {
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


def wan(frames: int = 3) -> Tiny:
    """Wan on a video of so many latent frames, 15 tokens each."""
    return Tiny(
        "WanTransformer3DModel",
        WAN,
        lambda g: {
            "hidden_states": randn(g, 2, 4, frames, 6, 10),
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "timestep": STEPS,
        },
    )


TINY = {
    "wan": wan(),
    "wan_per_token_timestep": Tiny(
        "WanTransformer3DModel",
        WAN,
        lambda g: {**wan().inputs(g), "timestep": torch.randint(0, 900, (2, 45), generator=g)},
    ),
    "wan_image_to_video": Tiny(
        "WanTransformer3DModel",
        {**WAN, "image_dim": 16, "added_kv_proj_dim": 48},
        lambda g: {
            "hidden_states": randn(g, 2, 4, 3, 6, 10),
            "encoder_hidden_states": randn(g, 2, 512, 16),
            "encoder_hidden_states_image": randn(g, 2, 257, 16),
            "timestep": STEPS,
        },
    ),
}
