"""ERNIE-Image."""

from __future__ import annotations

from typing import Any

from diffusers import ErnieImagePipeline, ErnieImageTransformer2DModel

from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, FlowMatchScheduler, asked, loud
from tests.pipelines.text.mistral import mistral3
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (48, 80)  # 3 x 5 tokens: the pipeline takes the autoencoder to make images 16 times smaller


def _make() -> Any:
    tokenizer, text_encoder = mistral3(hidden=16, causal_lm=False)
    transformer = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=4,
        num_layers=2,
        ffn_hidden_size=32,
        in_channels=4 * _LATENTS,
        out_channels=4 * _LATENTS,
        patch_size=1,
        text_in_dim=16,
        rope_axes_dim=(4, 2, 2),
    )
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
