"""Krea 2."""

from __future__ import annotations

from typing import Any

from diffusers import Krea2Pipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud
from tests.pipelines.text.qwen import qwen3_vl
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (24, 40)  # 3 x 5 tokens: the autoencoder makes it 4 times smaller, and the transformer sees patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = qwen3_vl(hidden=16, causal_lm=False)
    transformer = MODELS["krea2"].make()
    return Krea2Pipeline(
        scheduler=flow_match(use_dynamic_shifting=True, max_image_seq_len=6400),
        vae=vaes.qwen_image(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
        text_encoder_select_layers=(0, 1, 2),
    )


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=4.5, max_sequence_length=21)


TINY = {"krea2": TinyPipe(_make, _inputs, guidance="calls")}
