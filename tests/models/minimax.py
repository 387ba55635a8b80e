"""MiniMax-H3 and MiniMax Music 3."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import TIMES, Tiny, randn


def _packed(g: torch.Generator) -> dict[str, Any]:
    """One video row to condition on, then text and audio in turns, then video, then audio again."""
    video = torch.tensor([0, *range(9, 18)])
    text, audio = torch.tensor([1, 2, 3, 5]), torch.tensor([4, 6, 7, 8, 18])
    tags = torch.zeros(19, dtype=torch.long)
    tags[text], tags[audio] = 1, 2
    return {
        "hidden_states": randn(g, 2, 10, 16),
        "audio_hidden_states": randn(g, 2, 5, 6),
        "encoder_hidden_states": randn(g, 2, 4, 8),
        "timestep": torch.tensor([0.7, 0.3], dtype=torch.float64),
        "timestep_indices": torch.tensor([1] + [0] * 3 + [1, 0, 1, 1, 1] + [0] * 9 + [1]),
        "token_tags": tags,
        "position_ids": torch.randint(0, 9, (19, 3), generator=g).double(),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


TINY = {
    "minimax_h3": Tiny(
        "MiniMaxH3Transformer3DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 2,
            "ffn_dim": 32,
            "in_channels": 4,
            "audio_in_channels": 6,
            "patch_size": (1, 2, 2),
            "text_dim": 8,
            "freq_dim": 8,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        _packed,
    ),
    "minimax_music3": Tiny(
        "MiniMaxMusic3Transformer1DModel",
        {
            "in_channels": 4,
            "condition_dim": 16,
            "num_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "ff_inner_dim": 32,
            "rotary_dim": 4,
            "fourier_embedding_dim": 8,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 18),
            "encoder_hidden_states": randn(g, 2, 18, 16),
            "timestep": TIMES,
        },
    ),
}
