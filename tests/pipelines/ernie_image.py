"""ERNIE-Image."""

from __future__ import annotations

from typing import Any

from diffusers import ErnieImagePipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, FlowMatchScheduler, asked, loud
from tests.pipelines.text.mistral import mistral3
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (48, 80)  # 3 x 5 tokens: the pipeline takes the autoencoder to make images 16 times smaller


def _make() -> Any:
    tokenizer, text_encoder = mistral3(hidden=16, causal_lm=False)
    transformer = MODELS["ernie_image"].make(in_channels=4 * _LATENTS, out_channels=4 * _LATENTS)
    return ErnieImagePipeline(
        scheduler=FlowMatchScheduler(),
        vae=vaes.flux2(_LATENTS),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
    )


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=4.0)


TINY = {"ernie_image": TinyPipe(_make, _inputs, guidance="batch")}
