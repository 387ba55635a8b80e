"""HiDream."""

from __future__ import annotations

from typing import Any

from diffusers import HiDreamImagePipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud
from tests.pipelines.text.clip import clip
from tests.pipelines.text.llama import llama
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (20, 20)  # 5 x 5 tokens: the autoencoder halves both, and the transformer sees patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = clip(hidden=16, projection=8)
    tokenizer_2, text_encoder_2 = clip(hidden=16, projection=8)
    tokenizer_3, text_encoder_3 = t5(width=16)
    tokenizer_4, text_encoder_4 = llama(width=16, layers=2, causal_lm=True)
    text_encoder_4.set_attn_implementation("eager")  # the pipeline asks for its attention too
    transformer = MODELS["hidream"].make(
        caption_channels=[16, 16], text_emb_dim=16, max_resolution=(10, 10), llama_layers=(0, 1, 1, 0)
    )
    pipe = HiDreamImagePipeline(
        scheduler=flow_match(shift=3.0),
        vae=vaes.kl(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        text_encoder_3=text_encoder_3,
        tokenizer_3=tokenizer_3,
        text_encoder_4=text_encoder_4,
        tokenizer_4=tokenizer_4,
        transformer=loud(transformer),
    )
    pipe.default_sample_size = 10  # the pipeline makes all images as large as this says
    return pipe


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=5.0, max_sequence_length=29)


TINY = {"hidream": TinyPipe(_make, _inputs, guidance="batch")}
