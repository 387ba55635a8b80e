"""AuraFlow."""

from __future__ import annotations

from typing import Any

from diffusers import AuraFlowPipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud
from tests.pipelines.text.t5 import umt5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (12, 20)  # 3 x 5 tokens: the autoencoder halves both, and the transformer sees patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = umt5(width=16)
    transformer = MODELS["auraflow"].make()
    return AuraFlowPipeline(
        scheduler=flow_match(shift=1.73),
        vae=vaes.kl(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
    )


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=3.5, max_sequence_length=29)


TINY = {"auraflow": TinyPipe(_make, _inputs, guidance="batch")}
