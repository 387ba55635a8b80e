"""Bria 3.2 and FIBO."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLWan,
    BriaFiboPipeline,
    BriaPipeline,
)

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud, quiet
from tests.pipelines.text.smollm import smollm3
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZES = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}


def _bria() -> Any:
    tokenizer, text_encoder = t5(width=32)
    with quiet():
        transformer = MODELS["bria"].make(in_channels=4 * _LATENTS)
    return BriaPipeline(
        scheduler=flow_match(),
        vae=vaes.kl(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
    )


def _fibo() -> Any:
    tokenizer, text_encoder = smollm3(hidden=16)
    with quiet():
        transformer = MODELS["fibo"].make(text_encoder_dim=16)
    return BriaFiboPipeline(
        scheduler=flow_match(),
        vae=AutoencoderKLWan(
            base_dim=4,
            z_dim=_LATENTS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, False, False],
            latents_mean=[0.0] * _LATENTS,
            latents_std=[1.0] * _LATENTS,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
        ).eval(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
    )


TINY = {
    "bria": TinyPipe(  # 3 x 5 tokens: the autoencoder halves both, and the transformer sees patches of 2 x 2
        _bria,
        lambda: asked(12, 20, negative_prompt=NEGATIVE, guidance_scale=5.0, max_sequence_length=29),
        guidance="batch",
    ),
    "fibo": TinyPipe(  # 3 x 5 tokens: the autoencoder makes images 16 times smaller
        _fibo, lambda: asked(48, 80, negative_prompt=NEGATIVE, guidance_scale=5.0), guidance="batch"
    ),
}
