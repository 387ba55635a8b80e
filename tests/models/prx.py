"""PRX."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.models.tiny import TIMES, Tiny, padding_mask, randn


def prx(text: int = 7, mask: Tensor | None = None, **config: Any) -> Tiny:
    """PRX on 15 tokens with a text of so many."""
    return Tiny(
        "PRXTransformer2DModel",
        {
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": 16,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "num_heads": 4,
            "depth": 2,
            "axes_dim": [4, 4],
            **config,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 6, 10),
            "timestep": TIMES,
            "encoder_hidden_states": randn(g, 2, text, 16),
            "attention_mask": mask,
        },
    )


TINY = {
    "prx": prx(mask=padding_mask(4).bool()),
    "prx_no_mask": prx(resolution_embeds=True, bottleneck_size=8),
    "prx_short_text": prx(2, padding_mask(1, 2).bool()),
}
