"""Helios."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from diffusers import (
    HeliosDMDScheduler,
    HeliosPipeline,
    HeliosPyramidPipeline,
    HeliosScheduler,
)

from tests.models import TINY as MODELS
from tests.pipelines.media import image, prompt_embeds
from tests.pipelines.tiny import TinyPipe, no_zeros
from tests.pipelines.wan import SIZE, STEPS, common


def _scheduler(kind: type[Any], **config: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy, about tensors
        return kind(**config)


def _helios() -> HeliosPipeline:
    return HeliosPipeline(
        transformer=no_zeros(MODELS["helios"].make().eval()),
        scheduler=_scheduler(HeliosScheduler, stages=1, stage_range=[0, 1], use_dynamic_shifting=True),
        **common(),
    )


# With the default gamma, 1 / 3, the covariance of a block of noise is singular, so its Cholesky factor may not exist.
_GAMMA = 0.3


def _pyramid(kind: type[Any] = HeliosScheduler, *, is_distilled: bool = False) -> HeliosPyramidPipeline:
    return HeliosPyramidPipeline(
        transformer=no_zeros(MODELS["helios"].make().eval()),
        scheduler=_scheduler(kind, use_dynamic_shifting=True, gamma=_GAMMA),
        is_distilled=is_distilled,
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


def _pyramid_inputs() -> dict[str, Any]:
    """Two chunks of three latent frames, each denoised with 6, then 24, then 96 tokens."""
    inputs = {**_inputs(), "height": 64, "width": 128, "pyramid_num_inference_steps_list": [2, 2, 2]}
    del inputs["num_inference_steps"]
    return inputs


def _distilled_inputs() -> dict[str, Any]:
    return {**_pyramid_inputs(), "guidance_scale": 1.0}


TINY = {
    "helios": TinyPipe(_helios, _inputs, "calls", output="frames"),
    "helios_image_to_video": TinyPipe(_helios, _image_to_video_inputs, "calls", output="frames"),
    "helios_pyramid": TinyPipe(_pyramid, _pyramid_inputs, "calls", output="frames"),
    "helios_pyramid_distilled": TinyPipe(
        partial(_pyramid, HeliosDMDScheduler, is_distilled=True), _distilled_inputs, "none", output="frames"
    ),
}
