"""Lumina-Next and Lumina 2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Lumina2Pipeline, LuminaPipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud
from tests.pipelines.text.gemma import gemma2
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (48, 80)  # 3 x 5 tokens: the autoencoder makes it 8 times smaller, and the transformer sees patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = gemma2(hidden=16)
    transformer = MODELS["lumina2"].make(multiple_of=16, axes_lens=(128, 16, 16))
    return Lumina2Pipeline(
        scheduler=flow_match(shift=6.0),
        vae=vaes.kl(_LATENTS, levels=4),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
    )


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=4.0, system_prompt="Paint.", max_sequence_length=61)


def _next() -> Any:
    tokenizer, text_encoder = gemma2(hidden=16)
    transformer = MODELS["lumina_next"].make(sample_size=4)
    torch.nn.init.normal_(transformer.pad_token)  # left uninitialised
    return LuminaPipeline(
        scheduler=flow_match(),
        vae=vaes.kl(_LATENTS, levels=4),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
    )


def _next_inputs() -> dict[str, Any]:
    """Proportional attention (`proportional_attn`) is the default."""
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=4.0, clean_caption=False, max_sequence_length=61)


TINY = {
    "lumina2": TinyPipe(_make, _inputs, guidance="calls"),
    "lumina": TinyPipe(_next, _next_inputs, guidance="batch"),
}
