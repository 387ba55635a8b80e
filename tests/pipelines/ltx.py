"""LTX-Video."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXEulerAncestralRFScheduler,
    LTXI2VLongMultiPromptPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
)
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

from tests.models import TINY as MODELS
from tests.pipelines import vaes_video
from tests.pipelines.media import image, video
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe, no_zeros


def _components(**scheduler: Any) -> dict[str, Any]:
    tokenizer, text_encoder = t5()
    return {
        "transformer": no_zeros(MODELS["ltx"].make().eval()),
        "vae": vaes_video.ltx(),
        "scheduler": FlowMatchEulerDiscreteScheduler(**scheduler),
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
    }


def _ltx() -> LTXPipeline:
    return LTXPipeline(**_components(use_dynamic_shifting=True, shift_terminal=0.1))


def _image_to_video() -> LTXImageToVideoPipeline:
    return LTXImageToVideoPipeline(**_components())


def _condition() -> LTXConditionPipeline:
    return LTXConditionPipeline(**_components())


def _long() -> LTXI2VLongMultiPromptPipeline:
    return LTXI2VLongMultiPromptPipeline(**{**_components(), "scheduler": LTXEulerAncestralRFScheduler()})


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 tokens."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "max_sequence_length": 24,
        "height": 96,
        "width": 160,
        "num_frames": 17,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "output_type": "latent",
    }


def _image_to_video_inputs() -> dict[str, Any]:
    return {**_inputs(), "image": image(96, 160)}


def _condition_inputs() -> dict[str, Any]:
    """A first frame, and a later one as tokens of its own: 60 tokens."""
    conditions = [
        LTXVideoCondition(image=image(96, 160), frame_index=0),
        LTXVideoCondition(video=video(1, 96, 160, seed=2), frame_index=8, strength=0.8),
    ]
    # its own schedule of steps is a tensor, for which NumPy warns
    return {**_inputs(), "conditions": conditions, "timesteps": [1000.0, 500.0]}


def _long_inputs() -> dict[str, Any]:
    """Two windows of two latent frames, which overlap: the second one has a timestep for each token, [b, s, 1]."""
    inputs = {**_inputs(), "prompt": "A cat runs. | A dog sleeps.", "cond_image": image(96, 160)}
    return {**inputs, "temporal_tile_size": 16, "temporal_overlap": 8}


TINY = {
    "ltx": TinyPipe(_ltx, _inputs, "batch", output="frames"),
    "ltx_image_to_video": TinyPipe(_image_to_video, _image_to_video_inputs, "batch", output="frames"),
    "ltx_condition": TinyPipe(_condition, _condition_inputs, "batch", output="frames"),
    "ltx_long": TinyPipe(_long, _long_inputs, "batch", output="frames"),
}
