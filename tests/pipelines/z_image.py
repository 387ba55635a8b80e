"""Z-Image: text to image, image to image."""

from __future__ import annotations

from typing import Any

from diffusers import (
    ZImageControlNetModel,
    ZImageControlNetPipeline,
    ZImageImg2ImgPipeline,
    ZImagePipeline,
)
from torch import nn

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, picture
from tests.pipelines.text.qwen import qwen3
from tests.pipelines.tiny import TinyPipe, no_zeros

_LATENTS = 16
_SIZE = (20, 28)  # 5 x 7 tokens (which the class pads to 64): the autoencoder halves both, and patches are 2 x 2


def _make(pipeline: type, refiner: str | None = None) -> Any:
    tokenizer, text_encoder = qwen3(hidden=16)
    transformer = MODELS["z_image"].make()
    for token in (transformer.x_pad_token, transformer.cap_pad_token):  # diffusers leaves them as memory was
        nn.init.normal_(token, std=0.02)
    others = {}
    if pipeline is ZImageControlNetPipeline:
        control = ZImageControlNetModel(
            control_layers_places=[0, 1],
            control_refiner_layers_places=[0],
            control_in_dim=_LATENTS,
            add_control_noise_refiner=refiner,
            dim=32,
            n_refiner_layers=1,
            n_heads=4,
            n_kv_heads=4,
        )
        others["controlnet"] = no_zeros(control).eval()
    return pipeline(
        scheduler=flow_match(),
        vae=vaes.kl(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=no_zeros(transformer).eval(),
        **others,
    )


def _inputs(**others: Any) -> dict[str, Any]:
    return asked(*_SIZE, **{"negative_prompt": NEGATIVE, "guidance_scale": 3.0, "max_sequence_length": 40, **others})


TINY = {
    "z_image": TinyPipe(lambda: _make(ZImagePipeline), _inputs, guidance="batch"),
    "z_image_img2img": TinyPipe(
        lambda: _make(ZImageImg2ImgPipeline),
        lambda: _inputs(image=picture(*_SIZE), strength=0.5, num_inference_steps=4),
        guidance="batch",
    ),
    "z_image_controlnet": TinyPipe(
        lambda: _make(ZImageControlNetPipeline, "control_noise_refiner"),
        lambda: _inputs(control_image=picture(*_SIZE)),
        guidance="batch",
        controlnets=("controlnet",),
    ),
    "z_image_controlnet_twice": TinyPipe(  # its control layers run twice, so it stays whole
        lambda: _make(ZImageControlNetPipeline, "control_layers"),
        lambda: _inputs(control_image=picture(*_SIZE)),
        guidance="batch",
    ),
}
