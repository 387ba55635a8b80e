"""Wan, and classes with its configuration: AnyFlow, ChronoEdit, Helios, SkyReels-V2."""

# fmt: off
from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import Tiny

WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
    "text_dim": 16, "freq_dim": 256, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
}
_IMAGE = {"image_dim": 16, "added_kv_proj_dim": 48}
_LONG = {"frames": 5, "height": 2, "width": 10}  # 5 tokens of each frame
_WITH_IMAGE = {**_LONG, "text": 512, "images": 9}  # these classes take 512 tokens for text, the others for the image
_HELIOS = Tiny(
    "HeliosTransformer3DModel",
    {
        **{name: value for name, value in WAN.items() if name != "rope_max_seq_len"}, "rope_dim": (4, 4, 4),
        "has_multi_term_memory_patch": True, "guidance_cross_attn": True, "zero_history_timestep": True,
        "is_amplify_history": False,
    },
    {**_LONG, "long": 4},
)
_ANYFLOW = Tiny("AnyFlowTransformer3DModel", {x: y for x, y in WAN.items() if x != "qk_norm"}, _LONG)
_SKYREELS = Tiny("SkyReelsV2Transformer3DModel", WAN, _LONG)
_FORCED = {"timestep": "step batch frames", "enable_diffusion_forcing": True}
_CHRONOEDIT = Tiny("ChronoEditTransformer3DModel", WAN).but(rope_temporal_skip_len=8)
_VACE = Tiny("WanVACETransformer3DModel", {**WAN, "vace_layers": [0], "vace_in_channels": 12}, _LONG)
_ANIMATE = Tiny(
    "WanAnimateTransformer3DModel",
    {
        **WAN, "in_channels": 12, "latent_channels": 4, "motion_encoder_channel_sizes": {"4": 8, "8": 8},
        "motion_encoder_size": 8, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16,
        "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 1,
        "motion_encoder_batch_size": 3, "image_dim": 16, "added_kv_proj_dim": None,
    },
    {**_LONG, "frames": 4, "images": 9},
)


def wan(frames: int = 3) -> Tiny:
    """Wan on a video of so many latent frames, 15 tokens each."""
    return Tiny("WanTransformer3DModel", WAN, {"frames": frames, "height": 6, "width": 10})


TINY = {
    "anyflow": _ANYFLOW,
    "anyflow_image_to_video": _ANYFLOW.but({"images": 9}, image_dim=16, deltatime_type="t-r"),
    "helios": _HELIOS,
    "helios_amplified": _HELIOS.but(
        {"short": 3}, guidance_cross_attn=False, zero_history_timestep=False, is_amplify_history=True
    ),
    "helios_without_history": _HELIOS.but(has_multi_term_memory_patch=False),
    "helios_short_history": _HELIOS.but(
        inputs={
            **dict.fromkeys(f"{x}_history_{y}" for x in ("latents", "indices_latents") for y in ("mid", "long")),
            "latents_history_short": "float batch in_channels 1 2 4",
        }
    ),
    "skyreels": _SKYREELS,
    "skyreels_image_to_video": _SKYREELS.but(  # causal, one timestep for all
        {**_WITH_IMAGE, "frames": 25, "width": 2}, **_IMAGE, num_frame_per_block=5
    ),
    "skyreels_forcing": _SKYREELS.but(inputs={**_FORCED, "fps": [1]}, inject_sample_info=True),
    "skyreels_block_causal": _SKYREELS.but({"frames": 25}, _FORCED, num_frame_per_block=5),
    "wan": wan(),
    "wan_per_token_timestep": wan().but(inputs={"timestep": "step batch tokens"}),
    "wan_image_to_video": wan().but({"text": 512}, **_IMAGE),
    "chronoedit": _CHRONOEDIT.but({"frames": 2, "height": 2, "width": 14}),
    "chronoedit_per_token_timestep": _CHRONOEDIT.but(_WITH_IMAGE, {"timestep": "step batch tokens"}, **_IMAGE),
    "wan_vace": _VACE.but(
        inputs={
            "control_hidden_states": "float batch vace_in_channels 3 height width",  # padded to the video's frames
            "control_hidden_states_scale": torch.tensor([0.7, 1.2], dtype=torch.float64),
        },
        num_layers=3, vace_layers=[0, 2],
    ),
    "wan_vace_image_to_video": _VACE.but(_WITH_IMAGE, **_IMAGE),
    "wan_animate": _ANIMATE,
    "wan_animate_image": _ANIMATE.but({"text": 512}, added_kv_proj_dim=48),
}
