"""ACE-Step."""

from __future__ import annotations

import torch

from tests.models.tiny import TIMES, Tiny, randn

# Windows of 5 tokens among 17: narrower and wider than a shard.
TINY = {
    "ace_step": Tiny(
        "AceStepTransformer1DModel",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "in_channels": 12,
            "audio_acoustic_hidden_dim": 4,
            "patch_size": 2,
            "sliding_window": 5,
            "encoder_hidden_size": 16,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 33, 4),
            "context_latents": randn(g, 2, 33, 8),
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "timestep": TIMES,
            "timestep_r": torch.tensor([0.1, 0.5], dtype=torch.float64),
        },
    ),
}
