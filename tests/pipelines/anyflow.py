"""AnyFlow."""

from __future__ import annotations

from typing import Any

from diffusers import AnyFlowPipeline, FlowMapEulerDiscreteScheduler

from tests.models import TINY as MODELS
from tests.pipelines.media import video
from tests.pipelines.tiny import TinyPipe, no_zeros
from tests.pipelines.wan import SIZE, STEPS, TEXT, common


def _anyflow() -> AnyFlowPipeline:
    return AnyFlowPipeline(
        transformer=no_zeros(MODELS["anyflow"].make().eval()),
        scheduler=FlowMapEulerDiscreteScheduler(shift=5.0),
        **common(),
    )


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 tokens."""
    return {**TEXT, **SIZE, **STEPS, "num_frames": 9}


def _video_inputs() -> dict[str, Any]:
    """The first latent frame is that of a video."""
    return {**_inputs(), "video": video(1, 48, 80)}


TINY = {
    "anyflow": TinyPipe(_anyflow, _inputs, "batch", output="frames"),
    "anyflow_video": TinyPipe(_anyflow, _video_inputs, "batch", output="frames"),
}
