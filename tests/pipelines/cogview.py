"""CogView 3 Plus and CogView 4."""

from __future__ import annotations

from typing import Any

from diffusers import (
    CogVideoXDDIMScheduler,
    CogView3PlusPipeline,
    CogView4Pipeline,
)

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud
from tests.pipelines.text.glm import glm
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE_3 = (48, 80)  # 3 x 5 tokens: the autoencoder makes it 8 times smaller, and the transformer sees patches of 2 x 2
_SIZE_4 = (48, 80)


def _cogview3() -> Any:
    tokenizer, text_encoder = t5(width=16)
    return CogView3PlusPipeline(
        scheduler=CogVideoXDDIMScheduler(),
        vae=vaes.kl(_LATENTS, levels=4),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(MODELS["cogview3_plus"].make(text_embed_dim=16)),
    )


def _cogview4() -> Any:
    tokenizer, text_encoder = glm(hidden=16)
    return CogView4Pipeline(
        scheduler=flow_match(
            base_shift=0.25,
            max_shift=0.75,
            base_image_seq_len=256,
            use_dynamic_shifting=True,
            time_shift_type="linear",
        ),
        vae=vaes.kl(_LATENTS, levels=4),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(MODELS["cogview4"].make(text_embed_dim=16)),
    )


TINY = {
    "cogview3_plus": TinyPipe(
        _cogview3,
        lambda: asked(*_SIZE_3, negative_prompt=NEGATIVE, guidance_scale=5.0, max_sequence_length=29),
        guidance="batch",
    ),
    "cogview4": TinyPipe(  # texts are padded to multiples of 16: the two have other lengths
        _cogview4,
        lambda: asked(
            *_SIZE_4, prompt="two green birds fly over a grey lake", negative_prompt=NEGATIVE, guidance_scale=5.0
        ),
        guidance="calls",
    ),
}
