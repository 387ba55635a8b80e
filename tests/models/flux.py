"""FLUX.1, FLUX.2, FLUX.3, Chroma, LongCat-Image, Ovis-Image and Bria."""

# fmt: off
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import Tiny, padding_mask

_FLUX: dict[str, Any] = {
    "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
    "joint_attention_dim": 32, "axes_dims_rope": [4, 4, 8],
}
_GRID = {"height": 6, "width": 10}  # 15 tokens of 2 x 2 latents
_BATCHED = {"img_ids": "float 1 tokens 3", "txt_ids": "float 1 text 3"}
_CONTROLNET = {
    "controlnet_block_samples": "list 2 float batch tokens num_attention_heads*attention_head_dim",
    "controlnet_single_block_samples": "list 1 float batch tokens num_attention_heads*attention_head_dim",
}


def joint_mask() -> Tensor:
    """[2, text + image] of bool: the second sample has less text."""
    return torch.cat([padding_mask(4), torch.ones(2, 15)], dim=1).bool()


_JOINT_KEYS = {"joint_attention_kwargs": {"attention_mask": joint_mask()[:, None, None]}}
_JOINT_ROWS = {
    "joint_attention_kwargs": {"attention_mask": (joint_mask()[:, None] & joint_mask()[..., None])[:, None]}
}


def flux(text: int = 7) -> Tiny:
    """FLUX with a text of so many tokens."""
    return Tiny("FluxTransformer2DModel", {**_FLUX, "pooled_projection_dim": 32}, {**_GRID, "text": text})


_FLUX3 = Tiny("Flux3Transformer2DModel", {**_FLUX, "cond_in_channels": 6, "axes_dims_rope": [4, 4, 4, 4]}, _GRID)
_CHROMA = Tiny(
    "ChromaTransformer2DModel",
    {**_FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
    _GRID,
    {"attention_mask": joint_mask().double()},
)
_OVIS = Tiny("OvisImageTransformer2DModel", {**_FLUX, "out_channels": 4}, _GRID)
_BRIA = Tiny("BriaTransformer2DModel", _FLUX, _GRID)
_FIBO = Tiny("BriaFiboTransformer2DModel", {**_FLUX, "text_encoder_dim": 10}, {"height": 3, "width": 5})
_FIBO2 = Tiny(
    "BriaFibo2Transformer2DModel",
    {
        "in_channels": 4, "dim": 32, "n_layers": 3, "n_heads": 4, "cap_feat_dim": 12, "injection_layer_ids": (0, 2),
        "perceiver_num_layers": 1, "min_num_gist_tokens": 1, "max_num_gist_tokens": 9, "gist_step": 2,
        "gist_min_text_len": 1, "gist_max_text_len": 9, "axes_dims": (4, 2, 2), "axes_lens": (32, 8, 8),
    },
    _GRID,
)
TINY = {
    "bria": _BRIA,
    "bria_controlnet": _BRIA.but(
        {"text": 2}, {**_BATCHED, "controlnet_block_samples": _CONTROLNET["controlnet_block_samples"]}
    ),
    "fibo": _FIBO.but(inputs={**_BATCHED, **_JOINT_KEYS}),
    "fibo_rows": _FIBO.but(inputs=_JOINT_ROWS),
    "fibo_short_text": _FIBO.but({"text": 2}),
    "fibo2": _FIBO2,  # its gist comes first
    "fibo2_padded": _FIBO2.but(
        inputs={
            "encoder_attention_mask": "mask batch text",
            "context_latents": ["float batch in_channels 4 6", "float batch in_channels 2 4"],
        }
    ),
    "fibo2_references": _FIBO2.but({"text": 2}, {"context_latents": ["float batch in_channels 2 6"]}),
    "flux": flux(),
    "flux_short_text": flux(2),
    "flux_controlnet": flux().but(inputs={**_BATCHED, **_CONTROLNET, **_JOINT_KEYS}),
    "flux2": Tiny(
        "Flux2Transformer2DModel", {**_FLUX, "timestep_guidance_channels": 256, "axes_dims_rope": [4, 4, 4, 4]}, _GRID
    ),
    "flux3": _FLUX3,
    "flux3_reference": _FLUX3.but(
        inputs={"image_cond_hidden_states": "float batch 5 cond_in_channels", "image_cond_ids": "float 5 4"},
        flow_map=True,
    ),
    "chroma": _CHROMA,
    "chroma_bool": _CHROMA.but(inputs={"attention_mask": joint_mask()}),
    "chroma_controlnet": _CHROMA.but({"text": 2}, {**_BATCHED, **_CONTROLNET, "attention_mask": None}),
    "longcat_image": Tiny("LongCatImageTransformer2DModel", {**_FLUX, "pooled_projection_dim": 32}, _GRID),
    "ovis_image": _OVIS,
    "ovis_image_mask": _OVIS.but(inputs={**_BATCHED, **_JOINT_KEYS}),
}
