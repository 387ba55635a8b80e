"""Nucleus-Image, a mixture of experts."""

from __future__ import annotations

from typing import Any

from diffusers import NucleusMoEImagePipeline
from torch import nn

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud
from tests.pipelines.text.qwen import qwen3_vl, qwen3_vl_processor
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (24, 40)  # 3 x 5 tokens: the autoencoder makes it 4 times smaller, and the transformer sees patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = qwen3_vl(hidden=16)
    transformer = MODELS["nucleus_moe"].make()
    for name, parameter in transformer.named_parameters():
        if ".experts." in name:  # the class leaves them as the memory was
            nn.init.normal_(parameter, std=0.2)
    return NucleusMoEImagePipeline(
        scheduler=flow_match(),
        vae=vaes.qwen_image(_LATENTS, levels=2),
        text_encoder=text_encoder,
        processor=qwen3_vl_processor(tokenizer),
        transformer=loud(transformer),
    )


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=4.0, max_sequence_length=128, return_index=-1)


TINY = {"nucleus_moe": TinyPipe(_make, _inputs, guidance="calls")}
