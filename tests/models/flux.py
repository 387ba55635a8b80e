"""FLUX.1, FLUX.2, FLUX.3, Chroma, LongCat-Image and Ovis-Image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import TIMES, Tiny, padding_mask, randn

_FLUX = {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}
_FLUX1 = {**_FLUX, "pooled_projection_dim": 32}
_FLUX2 = {**_FLUX, "timestep_guidance_channels": 256, "axes_dims_rope": [4, 4, 4, 4]}
_FLUX3 = {**_FLUX, "cond_in_channels": 6, "axes_dims_rope": [4, 4, 4, 4]}
_CHROMA = {**_FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
_OVIS = {**_FLUX, "out_channels": 4}


def tokens(g: torch.Generator, text: int = 7, *, axes: int = 3) -> dict[str, Any]:
    """Arguments of all models of these families."""
    return {
        "hidden_states": randn(g, 2, 15, 4),
        "encoder_hidden_states": randn(g, 2, text, 32),
        "img_ids": randn(g, 15, axes),
        "txt_ids": randn(g, text, axes),
        "timestep": TIMES,
    }


def batched_ids(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same with a dim for the batch in the ids."""
    return {**inputs, "img_ids": inputs["img_ids"][None], "txt_ids": inputs["txt_ids"][None]}


def joint_mask() -> Tensor:
    """[2, text + image] of bool: the second sample has less text."""
    return torch.cat([padding_mask(4), torch.ones(2, 15)], dim=1).bool()


def controlnet(g: torch.Generator) -> dict[str, Any]:
    """Arguments that a ControlNet adds."""
    return {
        "controlnet_block_samples": [randn(g, 2, 15, 64) for _ in range(2)],
        "controlnet_single_block_samples": [randn(g, 2, 15, 64)],
    }


def flux(text: int = 7) -> Tiny:
    """FLUX with a text of so many tokens."""
    return Tiny(
        "FluxTransformer2DModel",
        _FLUX1,
        lambda g: {**tokens(g, text), "pooled_projections": randn(g, 2, 32)},
    )


def flux3(text: int = 7, reference: int = 0, *, flow_map: bool = False) -> Tiny:
    """FLUX.3 with so many tokens of text and of reference images."""
    return Tiny(
        "Flux3Transformer2DModel",
        {**_FLUX3, "flow_map": flow_map},
        lambda g: {
            **tokens(g, text, axes=4),
            "image_cond_hidden_states": randn(g, 2, reference, 6) if reference else None,
            "image_cond_ids": randn(g, reference, 4) if reference else None,
            "target_timestep": TIMES / 2 if flow_map else None,
        },
    )


def chroma(mask: Tensor | None) -> Tiny:
    """Chroma with this mask."""
    return Tiny("ChromaTransformer2DModel", _CHROMA, lambda g: {**tokens(g), "attention_mask": mask})


TINY = {
    "flux": flux(),
    "flux_short_text": flux(2),
    "flux_controlnet": Tiny(
        "FluxTransformer2DModel",
        _FLUX1,
        lambda g: {
            **batched_ids(flux().inputs(g)),
            **controlnet(g),
            "joint_attention_kwargs": {"attention_mask": joint_mask()[:, None, None]},
        },
    ),
    "flux2": Tiny(
        "Flux2Transformer2DModel",
        _FLUX2,
        lambda g: {
            "hidden_states": randn(g, 2, 15, 4),
            "encoder_hidden_states": randn(g, 2, 7, 32),
            "img_ids": randn(g, 2, 15, 4),
            "txt_ids": randn(g, 2, 7, 4),
            "timestep": TIMES,
            "guidance": torch.ones(2, dtype=torch.float64),
        },
    ),
    "flux3": flux3(),
    "flux3_reference": flux3(reference=5, flow_map=True),
    "chroma": chroma(joint_mask().double()),
    "chroma_bool": chroma(joint_mask()),
    "chroma_controlnet": Tiny(
        "ChromaTransformer2DModel", _CHROMA, lambda g: {**batched_ids(tokens(g, 2)), **controlnet(g)}
    ),
    "longcat_image": Tiny("LongCatImageTransformer2DModel", _FLUX1, tokens),
    "ovis_image": Tiny("OvisImageTransformer2DModel", _OVIS, tokens),
    "ovis_image_mask": Tiny(
        "OvisImageTransformer2DModel",
        _OVIS,
        lambda g: {
            **batched_ids(tokens(g)),
            "joint_attention_kwargs": {"attention_mask": joint_mask()[:, None, None]},
        },
    ),
}
