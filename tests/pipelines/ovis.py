"""Ovis-Image."""

from __future__ import annotations

from typing import Any

from diffusers import OvisImagePipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud
from tests.pipelines.text.qwen import qwen3
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (12, 20)  # 3 x 5 tokens: the autoencoder halves both, and the transformer sees patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = qwen3(hidden=16)
    transformer = MODELS["ovis_image"].make(in_channels=4 * _LATENTS, out_channels=4 * _LATENTS, joint_attention_dim=16)
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
