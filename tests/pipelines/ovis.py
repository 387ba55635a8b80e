"""Ovis-Image."""

from __future__ import annotations

from typing import Any

from diffusers import OvisImagePipeline, OvisImageTransformer2DModel

from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud
from tests.pipelines.text.qwen import qwen3
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (12, 20)  # 3 x 5 tokens: the autoencoder halves both, and the transformer sees patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = qwen3(hidden=16)
    transformer = OvisImageTransformer2DModel(
        in_channels=4 * _LATENTS,
        out_channels=4 * _LATENTS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    return OvisImagePipeline(
        scheduler=flow_match(),
        vae=vaes.kl(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
    )


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=5.0, max_sequence_length=29)


TINY = {"ovis_image": TinyPipe(_make, _inputs, guidance="calls")}
