"""Cosmos 3."""

from __future__ import annotations

from typing import Any

from diffusers import Cosmos3OmniPipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes_video
from tests.pipelines.media import image
from tests.pipelines.text.qwen import qwen_tokenizer
from tests.pipelines.tiny import TinyPipe, no_zeros
from tests.pipelines.wan import unipc


def _cosmos3() -> Cosmos3OmniPipeline:
    tokenizer = qwen_tokenizer()
    transformer = MODELS["cosmos3"].make(latent_channel=4, patch_latent_dim=16, vocab_size=len(tokenizer))
    return Cosmos3OmniPipeline(
        transformer=no_zeros(transformer.eval()),
        text_tokenizer=tokenizer,
        vae=vaes_video.wan(),
        scheduler=unipc(),
        enable_safety_checker=False,
    )


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 patches, after a text of a few tokens that is another length without the prompt."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "height": 48,
        "width": 80,
        "num_frames": 9,
        "num_inference_steps": 2,
        "guidance_scale": 5.0,
        "output_type": "latent",
        "use_system_prompt": False,
        "add_resolution_template": False,
        "add_duration_template": False,
    }


def _image_to_video_inputs() -> dict[str, Any]:
    return {**_inputs(), "image": image(48, 80)}


TINY = {
    "cosmos3": TinyPipe(_cosmos3, _inputs, "calls", output="video"),
    "cosmos3_image_to_video": TinyPipe(_cosmos3, _image_to_video_inputs, "calls", output="video"),
}
