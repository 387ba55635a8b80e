"""AnyFlow."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import Tiny, randn
from tests.models.wan import WAN

_CONFIG = {name: value for name, value in WAN.items() if name != "qk_norm"}


def anyflow(g: torch.Generator) -> dict[str, Any]:
    """Five latent frames, 5 tokens each, with timesteps of their own."""
    return {
        "hidden_states": randn(g, 2, 5, 4, 2, 10),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "timestep": torch.randint(500, 900, (2, 5), generator=g).double(),
        "r_timestep": torch.randint(0, 500, (2, 5), generator=g).double(),
    }


TINY = {
    "anyflow": Tiny("AnyFlowTransformer3DModel", _CONFIG, anyflow),
    "anyflow_image_to_video": Tiny(
        "AnyFlowTransformer3DModel",
        {**_CONFIG, "image_dim": 16, "deltatime_type": "t-r"},
        lambda g: {**anyflow(g), "encoder_hidden_states_image": randn(g, 2, 9, 16)},
    ),
}
