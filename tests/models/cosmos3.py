"""Cosmos 3."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import Tiny, randn

_CONFIG = {
    "head_dim": 12,
    "hidden_size": 48,
    "intermediate_size": 32,
    "latent_channel": 2,
    "latent_patch_size": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "patch_latent_dim": 8,
    "rope_axes_dim": [2, 2, 2],
    "vocab_size": 32,
}


def _video(g: torch.Generator, text: int = 5) -> dict[str, Any]:
    """A video of 3 x 2 x 3 tokens. Its first frame is given."""
    tokens, noisy = 18, 12
    return {
        "input_ids": torch.randint(0, 32, (text,), generator=g),
        "text_indexes": torch.arange(text),
        "position_ids": torch.randint(0, 9, (3, text + tokens), generator=g),
        "und_len": text,
        "sequence_length": text + tokens,
        "vision_tokens": [randn(g, 1, 2, 3, 4, 5)],
        "vision_token_shapes": [(3, 2, 3)],
        "vision_sequence_indexes": torch.arange(text, text + tokens),
        "vision_mse_loss_indexes": torch.arange(text + tokens - noisy, text + tokens),
        "vision_timesteps": torch.full((noisy,), 400.0, dtype=torch.float64),
        "vision_noisy_frame_indexes": [torch.tensor([1, 2])],
    }


def _with_sound(g: torch.Generator) -> dict[str, Any]:
    inputs = _video(g)
    start, frames = inputs["sequence_length"], 7
    return {
        **inputs,
        "position_ids": torch.randint(0, 9, (3, start + frames), generator=g),
        "sequence_length": start + frames,
        "sound_tokens": [randn(g, 6, frames)],
        "sound_token_shapes": [(frames, 1, 1)],
        "sound_sequence_indexes": torch.arange(start, start + frames),
        "sound_mse_loss_indexes": torch.arange(start, start + frames),
        "sound_timesteps": torch.full((frames,), 300.0, dtype=torch.float64),
        "sound_noisy_frame_indexes": [torch.arange(frames)],
    }


TINY = {
    "cosmos3": Tiny("Cosmos3OmniTransformer", _CONFIG, _video),
    "cosmos3_short_text": Tiny("Cosmos3OmniTransformer", _CONFIG, lambda g: _video(g, 2)),
    "cosmos3_nemotron": Tiny(
        "Cosmos3OmniTransformer",
        {**_CONFIG, "hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True},
        _video,
    ),
    "cosmos3_sound": Tiny("Cosmos3OmniTransformer", {**_CONFIG, "sound_gen": True, "sound_dim": 6}, _with_sound),
}
