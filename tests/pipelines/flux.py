"""FLUX.1: text to image, image to image, inpainting, Kontext, Fill, ControlNet."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxFillPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxKontextPipeline,
    FluxPipeline,
)

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, mask, picture, quiet
from tests.pipelines.text.clip import clip
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe, no_zeros

_LATENTS = 4
_SIZES = {
    "in_channels": 4 * _LATENTS,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}
_SIZE = (12, 20)  # 3 x 5 tokens: the autoencoder halves both, and the transformer sees patches of 2 x 2


def _make(pipeline: type, *, controlnets: int = 0, **sizes: Any) -> Any:
    tokenizer, text_encoder = clip(hidden=32)
    tokenizer_2, text_encoder_2 = t5(width=32)
    others = {}
    if controlnets:
        with quiet():
            models = [FluxControlNetModel(**{**_SIZES, "num_single_layers": 1}) for _ in range(controlnets)]
        models = [no_zeros(model).eval() for model in models]
        others["controlnet"] = models if controlnets > 1 else models[0]
    return pipeline(
        scheduler=flow_match(),
        vae=vaes.kl(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=no_zeros(MODELS["flux"].make(**{"in_channels": 4 * _LATENTS, **sizes})).eval(),
        **others,
    )


def _inputs(**others: Any) -> dict[str, Any]:
    return asked(*_SIZE, max_sequence_length=17, **others)


def _true_cfg(**others: Any) -> dict[str, Any]:
    return _inputs(negative_prompt=NEGATIVE, true_cfg_scale=3.0, **others)


TINY = {
    "flux": TinyPipe(
        lambda: _make(FluxPipeline, guidance_embeds=True), lambda: _inputs(guidance_scale=3.5), guidance="none"
    ),
    "flux_true_cfg": TinyPipe(lambda: _make(FluxPipeline), _true_cfg, guidance="calls"),
    "flux_img2img": TinyPipe(
        lambda: _make(FluxImg2ImgPipeline),
        lambda: _true_cfg(image=picture(*_SIZE), strength=0.5, num_inference_steps=4),
        guidance="calls",
    ),
    "flux_inpaint": TinyPipe(
        lambda: _make(FluxInpaintPipeline),
        lambda: _true_cfg(image=picture(*_SIZE), mask_image=mask(*_SIZE), strength=0.5, num_inference_steps=4),
        guidance="calls",
    ),
    "flux_kontext": TinyPipe(
        lambda: _make(FluxKontextPipeline, guidance_embeds=True),
        lambda: _true_cfg(image=picture(20, 12), max_area=_SIZE[0] * _SIZE[1], _auto_resize=False),
        guidance="calls",
    ),
    "flux_fill": TinyPipe(
        # The transformer sees the latents, the latents of the masked image and the mask of each pixel.
        lambda: _make(FluxFillPipeline, guidance_embeds=True, in_channels=8 * _LATENTS + 16, out_channels=4 * _LATENTS),
        lambda: _inputs(image=picture(*_SIZE), mask_image=mask(*_SIZE), guidance_scale=30.0),
        guidance="none",
    ),
    "flux_controlnet": TinyPipe(
        lambda: _make(FluxControlNetPipeline, controlnets=1),
        lambda: _true_cfg(control_image=picture(*_SIZE)),
        guidance="calls",
        controlnets=("controlnet",),
    ),
    "flux_two_controlnets": TinyPipe(
        lambda: _make(FluxControlNetPipeline, controlnets=2),
        lambda: _true_cfg(
            control_image=[picture(*_SIZE), picture(*_SIZE, seed=1)], controlnet_conditioning_scale=[0.8, 0.5]
        ),
        guidance="calls",
        controlnets=("controlnet.nets.0", "controlnet.nets.1"),
    ),
}
