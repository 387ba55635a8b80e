"""Kandinsky 5 and 6."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator

from tests.models.tiny import STEPS, TIMES, Tiny, padding_mask, randn

_SIZES = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 16,
    "in_text_dim2": 8,
    "time_dim": 16,
    "model_dim": 32,
    "ff_dim": 32,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (2, 2, 4),
}
_KANDINSKY6 = {
    **_SIZES,
    "in_audio_dim": 6,
    "out_audio_dim": 6,
    "visual_cond": False,
    "ca_rope": True,
    "cross_gates": True,
    "fix_modulation": True,
}


def _inputs(g: Generator) -> dict[str, Any]:
    return {
        "hidden_states": randn(g, 2, 1, 6, 10, 4),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "pooled_projections": randn(g, 2, 8),
    }


def kandinsky6(audio: int, **config: Any) -> Tiny:
    """Kandinsky 6 with so many tokens of audio."""
    return Tiny(
        "Kandinsky6Transformer3DModel",
        {**_KANDINSKY6, **config},
        lambda g: {
            **_inputs(g),
            "timestep": STEPS,
            "audio_hidden_states": randn(g, 2, audio, 6) if audio else None,
            "encoder_attention_mask": padding_mask(4).bool(),
        },
    )


def kandinsky5_nabla(frames: int = 1, width: int = 5, **sparse: Any) -> Tiny:
    """Kandinsky 5 with `sparse_params`: frames of 1 x `width` blocks."""
    blocks = frames * width
    return Tiny(
        "Kandinsky5Transformer3DModel",
        _SIZES,
        lambda g: {
            "hidden_states": randn(g, 2, frames, 16, 16 * width, 4),
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "pooled_projections": randn(g, 2, 8),
            "timestep": TIMES,
            "visual_rope_pos": (torch.arange(frames), torch.arange(8), torch.arange(8 * width)),
            "text_rope_pos": torch.arange(7),
            "sparse_params": {
                "sta_mask": torch.eye(blocks, dtype=torch.bool)[None, None],
                "to_fractal": True,
                "P": 0.5,
                **sparse,
            },
        },
    )


TINY = {
    "kandinsky5": Tiny(
        "Kandinsky5Transformer3DModel",
        _SIZES,
        lambda g: {
            **_inputs(g),
            "timestep": TIMES,
            "visual_rope_pos": (torch.arange(1), torch.arange(3), torch.arange(5)),
            "text_rope_pos": torch.arange(7),
        },
    ),
    "kandinsky6": kandinsky6(10),  # for 3 patches on 3 ranks
    "kandinsky6_other_widths": kandinsky6(
        5,
        ca_rope=False,
        cross_gates=False,
        fix_modulation=False,
        model_dim_a=16,
        ff_dim_a=24,
        axes_dims_a=(2, 2, 0),
    ),
    "kandinsky6_without_audio": kandinsky6(0),
    "kandinsky6_sr": Tiny(
        "Kandinsky6SRTransformer3DModel",
        {
            "in_visual_dim": 2,
            "out_visual_dim": 4,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 32,
            "num_visual_blocks": 2,
            "axes_dims": (2, 2, 4),
            "nabla_threshold": 0.5,
            "nabla_window": (1, 1, 1),
        },
        lambda g: {"hidden_states": randn(g, 2, 1, 8, 40, 5), "timestep": STEPS},
    ),
}
