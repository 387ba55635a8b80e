"""Mochi."""

from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, MochiPipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes_video
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe, no_zeros


def _mochi() -> MochiPipeline:
    transformer = MODELS["mochi"].make(in_channels=12, max_sequence_length=24)
    tokenizer, text_encoder = t5()
    return MochiPipeline(
        transformer=no_zeros(transformer.eval()),
        vae=vaes_video.mochi(),
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        tokenizer=tokenizer,
        text_encoder=text_encoder,
    )


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 patches."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "max_sequence_length": 24,
        "height": 48,
        "width": 80,
        "num_frames": 13,
        "num_inference_steps": 2,
        "guidance_scale": 4.5,
        "output_type": "latent",
    }


TINY = {"mochi": TinyPipe(_mochi, _inputs, "batch", output="frames")}
