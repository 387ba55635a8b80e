"""Ideogram 4: a transformer of its own computes the branch without text."""

from __future__ import annotations

from typing import Any

from diffusers import Ideogram4Pipeline
from torch import nn

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import asked, flow_match, loud
from tests.pipelines.text.qwen import qwen3_vl
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (48, 80)  # 3 x 5 tokens: the autoencoder makes it 8 times smaller, and the transformer sees patches of 2 x 2
_LAYERS, _WIDTH, _TAPPED = 36, 8, 13  # of the text encoder: the pipeline's layers are fixed


def _transformer() -> nn.Module:
    model = MODELS["ideogram4"].make(llm_features_dim=_WIDTH * _TAPPED)
    return loud(model)


def _make() -> Any:
    tokenizer, text_encoder = qwen3_vl(hidden=_WIDTH, layers=_LAYERS, heads=1, causal_lm=False)
    return Ideogram4Pipeline(
        scheduler=flow_match(),
        vae=vaes.flux2(_LATENTS),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=_transformer(),
        unconditional_transformer=_transformer(),
    )


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, guidance_schedule=[7.0, 3.0], max_sequence_length=27)


TINY = {
    "ideogram4": TinyPipe(_make, _inputs, guidance="calls", transformers=("transformer", "unconditional_transformer"))
}
