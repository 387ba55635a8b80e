"""SkyReels-V2."""

from __future__ import annotations

from typing import Any

from diffusers import (
    SkyReelsV2DiffusionForcingImageToVideoPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2ImageToVideoPipeline,
    SkyReelsV2Pipeline,
)

from tests.models import TINY as MODELS
from tests.pipelines.media import image, prompt_embeds
from tests.pipelines.tiny import TinyPipe, no_zeros
from tests.pipelines.wan import SIZE, STEPS, clip_vision, common, unipc


def _components(**config: Any) -> dict[str, Any]:
    transformer = MODELS["skyreels"].make(**config)
    return {"transformer": no_zeros(transformer.eval()), "scheduler": unipc(), **common()}


def _skyreels() -> SkyReelsV2Pipeline:
    return SkyReelsV2Pipeline(**_components())


def _image_to_video() -> SkyReelsV2ImageToVideoPipeline:
    config = {"in_channels": 12, "image_dim": 16, "added_kv_proj_dim": 48}
    return SkyReelsV2ImageToVideoPipeline(**_components(**config), **clip_vision())


def _forcing() -> SkyReelsV2DiffusionForcingPipeline:
    return SkyReelsV2DiffusionForcingPipeline(**_components(inject_sample_info=True))


def _forcing_image_to_video() -> SkyReelsV2DiffusionForcingImageToVideoPipeline:
    return SkyReelsV2DiffusionForcingImageToVideoPipeline(**_components(inject_sample_info=True))


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 tokens."""
    return {**prompt_embeds(9, 20, 24), **SIZE, **STEPS, "num_frames": 9}


def _image_to_video_inputs() -> dict[str, Any]:
    """The model takes 512 tokens for text, and the others for the image."""
    return {**_inputs(), **prompt_embeds(300, 500, 512), "image": image(48, 80)}


def _forcing_inputs() -> dict[str, Any]:
    return {**_inputs(), "prompt": None}


def _asynchronous_inputs() -> dict[str, Any]:
    """Nine latent frames of 5 tokens, in blocks of three, each a step behind the one before."""
    return {**_forcing_inputs(), "height": 16, "num_frames": 33, "ar_step": 1, "causal_block_size": 3}


def _long_inputs() -> dict[str, Any]:
    """Five latent frames, in windows of three that overlap."""
    return {
        **_forcing_inputs(),
        "num_frames": 17,
        "base_num_frames": 9,
        "overlap_history": 5,
    }


def _forcing_image_to_video_inputs() -> dict[str, Any]:
    return {**_forcing_inputs(), "image": image(48, 80)}


TINY = {
    "skyreels": TinyPipe(_skyreels, _inputs, "calls", output="frames"),
    "skyreels_image_to_video": TinyPipe(_image_to_video, _image_to_video_inputs, "calls", output="frames"),
    "skyreels_forcing": TinyPipe(_forcing, _forcing_inputs, "calls", output="frames"),
    "skyreels_forcing_asynchronous": TinyPipe(_forcing, _asynchronous_inputs, "calls", output="frames"),
    "skyreels_forcing_long": TinyPipe(_forcing, _long_inputs, "calls", output="frames"),
    "skyreels_forcing_image_to_video": TinyPipe(
        _forcing_image_to_video, _forcing_image_to_video_inputs, "calls", output="frames"
    ),
}
