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


def animate(image: bool = False) -> Tiny:
    """Animate on a reference and four latent frames, 5 tokens each; with a face adapter after each block."""
    return Tiny(
        "WanAnimateTransformer3DModel",
        {
            **WAN,
            "in_channels": 12,
            "latent_channels": 4,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8},
            "motion_encoder_size": 8,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 16,
            "face_encoder_hidden_dim": 16,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 1,
            "motion_encoder_batch_size": 3,
            "image_dim": 16,
            "added_kv_proj_dim": 48 if image else None,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 12, 5, 2, 10),
            "encoder_hidden_states": randn(g, 2, 512 if image else 7, 16),
            "encoder_hidden_states_image": randn(g, 2, 9, 16),
            "pose_hidden_states": randn(g, 2, 4, 4, 2, 10),
            "face_pixel_values": randn(g, 2, 3, 13, 8, 8),
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
    "chronoedit": Tiny(
        "ChronoEditTransformer3DModel",
        {**WAN, "rope_temporal_skip_len": 8},
        lambda g: {**wan().inputs(g), "hidden_states": randn(g, 2, 4, 2, 2, 14)},
    ),
    "chronoedit_per_token_timestep": Tiny(
        "ChronoEditTransformer3DModel",
        {**WAN, "rope_temporal_skip_len": 8, "image_dim": 16, "added_kv_proj_dim": 48},
        lambda g: {
            "hidden_states": randn(g, 2, 4, 5, 2, 10),
            "encoder_hidden_states": randn(g, 2, 512, 16),
            "encoder_hidden_states_image": randn(g, 2, 9, 16),
            "timestep": torch.randint(0, 900, (2, 25), generator=g),
        },
    ),
    "wan_vace": Tiny(
        "WanVACETransformer3DModel",
        {**WAN, "num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 12},
        lambda g: {
            "hidden_states": randn(g, 2, 4, 5, 2, 10),
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "control_hidden_states": randn(g, 2, 12, 3, 2, 10),  # the model pads it to the video's frames
            "control_hidden_states_scale": torch.tensor([0.7, 1.2], dtype=torch.float64),
            "timestep": STEPS,
        },
    ),
    "wan_vace_image_to_video": Tiny(
        "WanVACETransformer3DModel",
        {**WAN, "vace_layers": [0], "vace_in_channels": 12, "image_dim": 16, "added_kv_proj_dim": 48},
        lambda g: {
            "hidden_states": randn(g, 2, 4, 5, 2, 10),
            "encoder_hidden_states": randn(g, 2, 512, 16),
            "encoder_hidden_states_image": randn(g, 2, 9, 16),
            "control_hidden_states": randn(g, 2, 12, 5, 2, 10),
            "timestep": STEPS,
        },
    ),
    "wan_animate": animate(),
    "wan_animate_image": animate(image=True),
}
