"""ChronoEdit."""

from __future__ import annotations

from typing import Any

from diffusers import ChronoEditPipeline

from tests.models import TINY as MODELS
from tests.pipelines.media import image, prompt_embeds
from tests.pipelines.tiny import TinyPipe, no_zeros
from tests.pipelines.wan import SIZE, STEPS, clip_vision, common, unipc


def _chronoedit() -> ChronoEditPipeline:
    transformer = MODELS["chronoedit_per_token_timestep"].make(in_channels=12)
    return ChronoEditPipeline(transformer=no_zeros(transformer.eval()), scheduler=unipc(), **clip_vision(), **common())


def _inputs() -> dict[str, Any]:
    """Two latent frames of 15 tokens. The model takes 512 tokens for text, and the others for the image."""
    return {**prompt_embeds(300, 500, 512), **SIZE, **STEPS, "image": image(48, 80)}


def _reasoning_inputs() -> dict[str, Any]:
    """Three latent frames in the first step, and two in the second."""
    return {**_inputs(), "num_frames": 9, "enable_temporal_reasoning": True, "num_temporal_reasoning_steps": 1}


TINY = {
    "chronoedit": TinyPipe(_chronoedit, _inputs, "calls", output="frames"),
    "chronoedit_reasoning": TinyPipe(_chronoedit, _reasoning_inputs, "calls", output="frames"),
}
