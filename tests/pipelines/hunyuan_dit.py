"""HunyuanDiT."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DDPMScheduler,
    HunyuanDiT2DControlNetModel,
    HunyuanDiT2DModel,
    HunyuanDiTControlNetPipeline,
    HunyuanDiTPipeline,
)

from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, loud, picture
from tests.pipelines.text.bert import bert
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZES: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": _LATENTS,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "cross_attention_dim": 16,
    "cross_attention_dim_t5": 16,
    "pooled_projection_dim": 4,
    "hidden_size": 32,
    "text_len": 77,
    "text_len_t5": 256,
}
_SIZE = (48, 80)  # 3 x 5 tokens: the autoencoder makes it 8 times smaller, and the transformer sees patches of 2 x 2


def _make(pipeline: type) -> Any:
    tokenizer, text_encoder = bert(hidden=16)
    tokenizer_2, text_encoder_2 = t5(width=16, max_length=256)
    transformer = HunyuanDiT2DModel(**_SIZES, num_layers=4)
    others = {}
    if pipeline is HunyuanDiTControlNetPipeline:
        others["controlnet"] = loud(HunyuanDiT2DControlNetModel(**_SIZES, transformer_num_layers=4), gain=1.0)
    return pipeline(
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
        **others,
    )


def _inputs(**others: Any) -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=5.0, use_resolution_binning=False, **others)


TINY = {
    "hunyuan_dit": TinyPipe(lambda: _make(HunyuanDiTPipeline), _inputs, guidance="batch"),
    "hunyuan_dit_controlnet": TinyPipe(
        lambda: _make(HunyuanDiTControlNetPipeline),
        lambda: _inputs(control_image=picture(*_SIZE)),
        guidance="batch",
        controlnets=("controlnet",),
    ),
}
