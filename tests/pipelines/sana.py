"""Sana, Sana Sprint."""

from __future__ import annotations

from typing import Any

from diffusers import (
    SanaControlNetModel,
    SanaControlNetPipeline,
    SanaPipeline,
    SanaSprintPipeline,
    SanaTransformer2DModel,
    SCMScheduler,
)

from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, MultistepScheduler, asked, loud, picture
from tests.pipelines.text.gemma import gemma2
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (160, 96)  # 5 x 3 tokens: the autoencoder makes it 32 times smaller


def _make(pipeline: type) -> Any:
    sprint = pipeline is SanaSprintPipeline
    tokenizer, text_encoder = gemma2(hidden=16)
    sizes: dict[str, Any] = {
        "patch_size": 1,
        "in_channels": _LATENTS,
        "out_channels": _LATENTS,
        "num_attention_heads": 4,
        "attention_head_dim": 4,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 4,
        "cross_attention_dim": 16,
        "caption_channels": 16,
        "sample_size": 8,
    }
    transformer = SanaTransformer2DModel(
        **sizes, num_layers=2, qk_norm="rms_norm_across_heads" if sprint else None, guidance_embeds=sprint
    )
    others = {}
    if pipeline is SanaControlNetPipeline:
        others["controlnet"] = loud(SanaControlNetModel(**sizes, num_layers=1))
    return pipeline(
        scheduler=SCMScheduler() if sprint else MultistepScheduler(prediction_type="flow_prediction"),
        vae=vaes.dc(_LATENTS),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
        **others,
    )


def _inputs(**others: Any) -> dict[str, Any]:
    return asked(
        *_SIZE,
        guidance_scale=4.5,
        max_sequence_length=21,
        use_resolution_binning=False,
        complex_human_instruction=["Add colors:", "User: "],
        **others,
    )


TINY = {
    "sana": TinyPipe(lambda: _make(SanaPipeline), lambda: _inputs(negative_prompt=NEGATIVE), guidance="batch"),
    "sana_controlnet": TinyPipe(
        lambda: _make(SanaControlNetPipeline),
        lambda: _inputs(negative_prompt=NEGATIVE, control_image=picture(*_SIZE)),
        guidance="batch",
        controlnets=("controlnet",),
    ),
    "sana_sprint": TinyPipe(lambda: _make(SanaSprintPipeline), _inputs, guidance="none"),
}
