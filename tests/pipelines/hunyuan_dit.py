"""HunyuanDiT."""

from __future__ import annotations

from typing import Any

from diffusers import DDPMScheduler, HunyuanDiT2DModel, HunyuanDiTPipeline

from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, loud
from tests.pipelines.text.bert import bert
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (48, 80)  # 3 x 5 tokens: the autoencoder makes it 8 times smaller, and the transformer sees patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = bert(hidden=16)
    tokenizer_2, text_encoder_2 = t5(width=16, max_length=256)
    transformer = HunyuanDiT2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=_LATENTS,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=4,
        hidden_size=32,
        text_len=77,
        text_len_t5=256,
    )
    return HunyuanDiTPipeline(
        scheduler=DDPMScheduler(),
        vae=vaes.kl(_LATENTS, levels=4),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=loud(transformer, gain=1.0),  # larger ones magnify the last bit of float32 too much
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=5.0, use_resolution_binning=False)


TINY = {"hunyuan_dit": TinyPipe(_make, _inputs, guidance="batch")}
