"""Bria, FIBO and FIBO 2."""

from __future__ import annotations

from tests.models.flux import batched_ids, controlnet, joint_mask, tokens
from tests.models.tiny import TIMES, Tiny, padding_mask, randn

_BRIA = {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}
_FIBO = {**_BRIA, "text_encoder_dim": 10}
_FIBO2 = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "cap_feat_dim": 12,
    "injection_layer_ids": (0, 2),
    "perceiver_num_layers": 1,
    "min_num_gist_tokens": 1,
    "max_num_gist_tokens": 9,
    "gist_step": 2,
    "gist_min_text_len": 1,
    "gist_max_text_len": 9,
    "axes_dims": (4, 2, 2),
    "axes_lens": (32, 8, 8),
}


def fibo(text: int = 7) -> Tiny:
    """FIBO with so many tokens of text, no padding."""
    return Tiny(
        "BriaFiboTransformer2DModel",
        _FIBO,
        lambda g: {**tokens(g, text), "text_encoder_layers": [randn(g, 2, text, 10) for _ in range(4)]},
    )


def fibo2(text: int = 7) -> Tiny:
    """FIBO 2 with so many tokens of text, no padding: the gist comes first."""
    return Tiny(
        "BriaFibo2Transformer2DModel",
        _FIBO2,
        lambda g: {
            "hidden_states": randn(g, 2, 4, 6, 10),
            "timestep": TIMES,
            "encoder_hidden_states": randn(g, 2, 3, text, 12),
        },
    )


TINY = {
    "bria": Tiny("BriaTransformer2DModel", _BRIA, tokens),
    "bria_controlnet": Tiny(
        "BriaTransformer2DModel",
        _BRIA,
        lambda g: {
            **batched_ids(tokens(g, 2)),
            "controlnet_block_samples": controlnet(g)["controlnet_block_samples"],
        },
    ),
    "fibo": Tiny(
        "BriaFiboTransformer2DModel",
        _FIBO,
        lambda g: {
            **batched_ids(fibo().inputs(g)),
            "joint_attention_kwargs": {"attention_mask": joint_mask()[:, None, None]},
        },
    ),
    "fibo_rows": Tiny(
        "BriaFiboTransformer2DModel",
        _FIBO,
        lambda g: {
            **fibo().inputs(g),
            "joint_attention_kwargs": {"attention_mask": (joint_mask()[:, None] & joint_mask()[..., None])[:, None]},
        },
    ),
    "fibo_short_text": fibo(2),
    "fibo2": fibo2(),
    "fibo2_padded": Tiny(
        "BriaFibo2Transformer2DModel",
        _FIBO2,
        lambda g: {
            **fibo2().inputs(g),
            "encoder_attention_mask": padding_mask(4).bool(),
            "context_latents": [randn(g, 2, 4, 4, 6), randn(g, 2, 4, 2, 4)],
        },
    ),
    "fibo2_references": Tiny(
        "BriaFibo2Transformer2DModel",
        _FIBO2,
        lambda g: {**fibo2(2).inputs(g), "context_latents": [randn(g, 2, 4, 2, 6)]},
    ),
}
