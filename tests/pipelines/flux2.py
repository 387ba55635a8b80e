"""FLUX.2 and FLUX.2 Klein, with and without reference images."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Flux2KleinKVPipeline, Flux2KleinPipeline, Flux2Pipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import asked, flow_match, loud, picture
from tests.pipelines.text.mistral import mistral3
from tests.pipelines.text.qwen import qwen3
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (48, 80)  # 3 x 5 tokens: the autoencoder makes it 8 times smaller, and the transformer sees patches of 2 x 2
_IMAGE_SIZE = (80, 80)  # no side may be below 64
_TEXT = 3 * 16  # of three layers of the encoder: the pipelines take them from the first 30, or 27


def _make(pipeline: type) -> Any:
    klein = pipeline is not Flux2Pipeline
    tokenizer, text_encoder = qwen3(hidden=16, layers=27, causal_lm=True) if klein else mistral3(hidden=16, layers=30)
    transformer = MODELS["flux2"].make(in_channels=4 * _LATENTS, joint_attention_dim=_TEXT, guidance_embeds=not klein)
    return pipeline(
        scheduler=flow_match(),
        vae=vaes.flux2(_LATENTS),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
    )


def _inputs(**others: Any) -> dict[str, Any]:
    return asked(*_SIZE, **others)


def _klein(**others: Any) -> dict[str, Any]:
    """Its negative prompt is empty unless it is given as embeddings."""
    negative = torch.randn(1, 13, _TEXT, generator=torch.Generator().manual_seed(4))
    return _inputs(max_sequence_length=25, guidance_scale=4.0, negative_prompt_embeds=negative, **others)


TINY = {
    "flux2": TinyPipe(
        lambda: _make(Flux2Pipeline), lambda: _inputs(max_sequence_length=67, guidance_scale=4.0), guidance="none"
    ),
    "flux2_image": TinyPipe(
        lambda: _make(Flux2Pipeline),
        lambda: _inputs(max_sequence_length=67, guidance_scale=4.0, image=picture(*_IMAGE_SIZE)),
        guidance="none",
    ),
    "flux2_klein": TinyPipe(lambda: _make(Flux2KleinPipeline), _klein, guidance="calls"),
    "flux2_klein_kv": TinyPipe(  # keeps the keys of the reference image
        lambda: _make(Flux2KleinKVPipeline),
        lambda: _inputs(max_sequence_length=25, image=picture(*_IMAGE_SIZE)),
        guidance="none",
    ),
    "flux2_klein_image": TinyPipe(
        lambda: _make(Flux2KleinPipeline), lambda: _klein(image=picture(*_IMAGE_SIZE)), guidance="calls"
    ),
}
