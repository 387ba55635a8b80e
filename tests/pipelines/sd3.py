"""Stable Diffusion 3: text to image, image to image, and guidance that skips layers."""

from __future__ import annotations

from typing import Any

from diffusers import (
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3Pipeline,
)

from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud, picture
from tests.pipelines.text.clip import clip
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZES: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": _LATENTS,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "caption_projection_dim": 32,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "out_channels": _LATENTS,
    "pos_embed_max_size": 16,
    "qk_norm": "rms_norm",
}
_SIZE = (12, 20)  # 3 x 5 tokens: the autoencoder halves both, and the transformer sees patches of 2 x 2

_CONTROL_SIZE = (24, 40)  # must be multiples of 8


def _make(pipeline: type) -> Any:
    tokenizer, text_encoder = clip(hidden=16, projection=16, length=31)
    tokenizer_2, text_encoder_2 = clip(hidden=16, projection=16, length=31)
    tokenizer_3, text_encoder_3 = t5(width=32)
    transformer = SD3Transformer2DModel(**_SIZES, num_layers=3, dual_attention_layers=(0,))
    others = {}
    if pipeline is StableDiffusion3ControlNetPipeline:
        others["controlnet"] = loud(SD3ControlNetModel(**_SIZES, num_layers=2))
    return pipeline(
        scheduler=flow_match(shift=3.0),
        vae=vaes.kl(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        text_encoder_3=text_encoder_3,
        tokenizer_3=tokenizer_3,
        transformer=loud(transformer),
        **others,
    )


def _inputs(size: tuple[int, int] = _SIZE, **others: Any) -> dict[str, Any]:
    return asked(*size, negative_prompt=NEGATIVE, guidance_scale=5.0, max_sequence_length=17, **others)


TINY = {
    "sd3": TinyPipe(lambda: _make(StableDiffusion3Pipeline), _inputs, guidance="batch"),
    "sd3_img2img": TinyPipe(
        lambda: _make(StableDiffusion3Img2ImgPipeline),
        lambda: _inputs(image=picture(*_SIZE), strength=0.5) | {"num_inference_steps": 4},
        guidance="batch",
    ),
    "sd3_controlnet": TinyPipe(
        lambda: _make(StableDiffusion3ControlNetPipeline),
        lambda: _inputs(_CONTROL_SIZE, control_image=picture(*_CONTROL_SIZE), controlnet_conditioning_scale=0.7),
        guidance="batch",
        controlnets=("controlnet",),
    ),
    "sd3_skip_layers": TinyPipe(  # two branches in one call, and one more with the layers left out
        lambda: _make(StableDiffusion3Pipeline),
        lambda: _inputs(skip_guidance_layers=[1], skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0),
        guidance="batch",
    ),
}
