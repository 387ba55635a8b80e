"""PixArt-Alpha and PixArt-Sigma."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DDIMScheduler,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)

from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, NEGATIVES, PROMPTS, MultistepScheduler, asked, loud
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (48, 80)  # 3 x 5 tokens: the autoencoder makes it 8 times smaller, and the transformer sees patches of 2 x 2


def _make(pipeline: type) -> Any:
    alpha = pipeline is PixArtAlphaPipeline
    tokenizer, text_encoder = t5(width=16)
    transformer = PixArtTransformer2DModel(
        sample_size=128 if alpha else 8,  # 128: it also takes the resolution
        num_layers=2,
        patch_size=2,
        attention_head_dim=12,
        num_attention_heads=4,
        in_channels=_LATENTS,
        cross_attention_dim=48,
        out_channels=2 * _LATENTS,
        caption_channels=16,
    )
    return pipeline(
        scheduler=MultistepScheduler() if alpha else DDIMScheduler(),
        vae=vaes.kl(_LATENTS, levels=4),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer, gain=1.0),  # larger ones magnify the last bit of float32 too much
    )


def _inputs(**others: Any) -> dict[str, Any]:
    arguments = {
        "negative_prompt": NEGATIVE,
        "guidance_scale": 4.5,
        "max_sequence_length": 29,
        "clean_caption": False,
        "use_resolution_binning": False,
    }
    return asked(*_SIZE, **{**arguments, **others})


TINY = {
    "pixart_alpha": TinyPipe(lambda: _make(PixArtAlphaPipeline), _inputs, guidance="batch"),
    "pixart_sigma": TinyPipe(lambda: _make(PixArtSigmaPipeline), _inputs, guidance="batch"),
    "pixart_sigma_two_prompts": TinyPipe(
        lambda: _make(PixArtSigmaPipeline),
        lambda: _inputs(prompt=PROMPTS, negative_prompt=NEGATIVES),
        guidance="batch",
    ),
}
