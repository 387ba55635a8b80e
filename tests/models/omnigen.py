"""OmniGen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import TIMES, Tiny, randn

_TEXT, _IMAGE = 24, 18
_OMNIGEN = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "num_layers": 2,
    "pad_token_id": 0,
    "vocab_size": 50,
    "pos_embed_max_size": 16,
    "time_step_dim": 8,
    "rope_scaling": {"short_factor": [1, 1.5, 2, 3], "long_factor": [2, 3, 4, 5]},
}


def omnigen_mask(padding: int, text: int = _TEXT) -> Tensor:
    """[s, s] as its pipeline makes it: text and time are causal, the image sees all; padding lies in front."""
    seen = torch.ones(text + 1 + _IMAGE, text + 1 + _IMAGE, dtype=torch.float64)
    seen[: text + 1] = seen[: text + 1].tril()
    seen[:, :padding] = 0
    seen[:padding] = 1
    return seen


def omnigen_positions(padding: int) -> Tensor:
    """[s]: positions as its pipeline makes them. The class uses those of the first sample."""
    return (torch.arange(_TEXT + 1 + _IMAGE) - padding).clamp_min(0)


def conditioned(g: torch.Generator) -> dict[str, Any]:
    """Text of 24 tokens. In the first sample, 9 of them are replaced by an image, and 5 are padding."""
    return {
        "hidden_states": randn(g, 2, 4, 6, 12),
        "timestep": TIMES,
        "input_ids": torch.randint(1, 50, (2, _TEXT), generator=g),
        "input_img_latents": [randn(g, 1, 4, 6, 6)],
        "input_image_sizes": {0: [[8, 17]]},
        "attention_mask": torch.stack([omnigen_mask(5), omnigen_mask(0)]),
        "position_ids": torch.stack([omnigen_positions(5), omnigen_positions(0)]),
    }


TINY = {
    "omnigen": Tiny("OmniGenTransformer2DModel", _OMNIGEN, conditioned),
    "omnigen_unconditioned": Tiny(
        "OmniGenTransformer2DModel",
        _OMNIGEN,
        lambda g: {
            **conditioned(g),
            "input_ids": None,
            "input_img_latents": None,
            "input_image_sizes": None,
            "attention_mask": None,
            "position_ids": torch.arange(1 + _IMAGE).expand(2, -1),
        },
    ),
}
