"""SkyReels-V2."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.models.tiny import STEPS, Tiny, randn
from tests.models.wan import WAN


def forced(g: torch.Generator, frames: int) -> dict[str, Tensor | bool]:
    """A timestep for each of so many latent frames, 5 tokens each."""
    return {
        "hidden_states": randn(g, 2, 4, frames, 2, 10),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "timestep": torch.randint(0, 900, (2, frames), generator=g),
        "enable_diffusion_forcing": True,
    }


TINY = {
    "skyreels": Tiny(
        "SkyReelsV2Transformer3DModel",
        WAN,
        lambda g: {
            "hidden_states": randn(g, 2, 4, 5, 2, 10),
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "timestep": STEPS,
        },
    ),
    "skyreels_image_to_video": Tiny(
        "SkyReelsV2Transformer3DModel",
        {**WAN, "image_dim": 16, "added_kv_proj_dim": 48, "num_frame_per_block": 5},  # causal, one timestep for all
        lambda g: {
            "hidden_states": randn(g, 2, 4, 25, 2, 2),
            "encoder_hidden_states": randn(g, 2, 512, 16),
            "encoder_hidden_states_image": randn(g, 2, 9, 16),
            "timestep": STEPS,
        },
    ),
    "skyreels_forcing": Tiny(
        "SkyReelsV2Transformer3DModel",
        {**WAN, "inject_sample_info": True},
        lambda g: {**forced(g, 5), "fps": [1]},
    ),
    "skyreels_block_causal": Tiny(
        "SkyReelsV2Transformer3DModel", {**WAN, "num_frame_per_block": 5}, lambda g: forced(g, 25)
    ),
}
