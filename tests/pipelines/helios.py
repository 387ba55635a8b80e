"""Helios."""

from __future__ import annotations

import warnings
from typing import Any

from diffusers import HeliosPipeline, HeliosScheduler, HeliosTransformer3DModel

from tests.models.helios import _CONFIG
from tests.pipelines.media import image, prompt_embeds
from tests.pipelines.tiny import TinyPipe, no_zeros
from tests.pipelines.wan import SIZE, STEPS, common


def _scheduler() -> HeliosScheduler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy, about tensors
        return HeliosScheduler(stages=1, stage_range=[0, 1], use_dynamic_shifting=True)


def _helios() -> HeliosPipeline:
    return HeliosPipeline(
        transformer=no_zeros(HeliosTransformer3DModel(**_CONFIG).eval()),
        scheduler=_scheduler(),
        **common(),
    )


def _inputs() -> dict[str, Any]:
    """Two chunks of three latent frames, 15 tokens each; the second has the first as its history."""
    return {
        **prompt_embeds(9, 20, 24),
        **SIZE,
        **STEPS,
        "num_frames": 18,
        "num_latent_frames_per_chunk": 3,
        "history_sizes": [4, 2, 1],
    }


def _image_to_video_inputs() -> dict[str, Any]:
    return {**_inputs(), "image": image(48, 80)}


TINY = {
    "helios": TinyPipe(_helios, _inputs, "calls", output="frames"),
    "helios_image_to_video": TinyPipe(_helios, _image_to_video_inputs, "calls", output="frames"),
}
