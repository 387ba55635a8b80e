"""Chroma: text to image, image to image."""

from __future__ import annotations

from typing import Any

from diffusers import ChromaImg2ImgPipeline, ChromaPipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud, picture, quiet
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (12, 20)  # 3 x 5 tokens: the autoencoder halves both, and the transformer sees patches of 2 x 2


def _make(pipeline: type) -> Any:
    tokenizer, text_encoder = t5(width=32)
    with quiet():
        transformer = MODELS["chroma"].make(in_channels=4 * _LATENTS)
    return pipeline(
        scheduler=flow_match(),
        vae=vaes.kl(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
    )


def _inputs(**others: Any) -> dict[str, Any]:
    return asked(*_SIZE, **{"negative_prompt": NEGATIVE, "guidance_scale": 4.0, "max_sequence_length": 29, **others})


TINY = {
    "chroma": TinyPipe(lambda: _make(ChromaPipeline), _inputs, guidance="calls"),
    "chroma_img2img": TinyPipe(
        lambda: _make(ChromaImg2ImgPipeline),
        lambda: _inputs(image=picture(*_SIZE), strength=0.5, num_inference_steps=4),
        guidance="calls",
    ),
}
