"""GLM-Image, with the tokens that its language model would give."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import GlmImagePipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import asked, flow_match, loud
from tests.pipelines.text.byt5 import byt5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (96, 160)  # 6 x 10 tokens: the autoencoder makes it 8 times smaller, and the transformer sees patches of 2 x 2
_CODES = 64


def _make() -> Any:
    tokenizer, text_encoder = byt5(width=16)
    transformer = MODELS["glm_image"].make()
    return GlmImagePipeline(
        scheduler=flow_match(),
        vae=vaes.kl(_LATENTS, levels=4),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        processor=None,
        vision_language_encoder=None,
        transformer=loud(transformer),
    )


def _inputs() -> dict[str, Any]:
    """Its negative prompt is empty unless it is given as embeddings."""
    g = torch.Generator().manual_seed(4)
    return asked(
        *_SIZE,
        prompt='a sign that says "open"',
        prior_token_ids=torch.randint(0, _CODES, (1, 60), generator=g),
        negative_prompt_embeds=torch.randn(1, 11, 16, generator=g),
        guidance_scale=3.0,
    )


TINY = {"glm_image": TinyPipe(_make, _inputs, guidance="calls")}
