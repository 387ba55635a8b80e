"""SanaVideo."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SanaImageToVideoPipeline,
    SanaVideoPipeline,
)

from tests.models import TINY as MODELS
from tests.pipelines import vaes_video
from tests.pipelines.media import image
from tests.pipelines.text.gemma import gemma2
from tests.pipelines.tiny import TinyPipe, no_zeros
from tests.pipelines.wan import unipc


def _components() -> dict[str, Any]:
    transformer = MODELS["sana_video"].make(patch_size=(1, 4, 4))
    tokenizer, text_encoder = gemma2(hidden=8)
    torch.nn.init.normal_(text_encoder.get_input_embeddings().weight)  # so that words differ much
    return {
        "transformer": no_zeros(transformer.eval()),
        "vae": vaes_video.wan(),
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
    }


def _text_to_video() -> SanaVideoPipeline:
    return SanaVideoPipeline(scheduler=unipc(), **_components())


def _image_to_video() -> SanaImageToVideoPipeline:
    return SanaImageToVideoPipeline(scheduler=FlowMatchEulerDiscreteScheduler(shift=8.0), **_components())


def _inputs() -> dict[str, Any]:
    """Five latent frames of 15 patches."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "complex_human_instruction": ["Enhance:"],
        "max_sequence_length": 24,
        "use_resolution_binning": False,
        "height": 96,
        "width": 160,
        "frames": 17,
        "num_inference_steps": 2,
        "guidance_scale": 6.0,
        "output_type": "latent",
    }


def _image_to_video_inputs() -> dict[str, Any]:
    return {**_inputs(), "image": image(96, 160)}


TINY = {
    "sana_video": TinyPipe(_text_to_video, _inputs, "batch", output="frames"),
    "sana_video_image_to_video": TinyPipe(_image_to_video, _image_to_video_inputs, "batch", output="frames"),
}
