"""Cosmos, Cosmos 2 and Cosmos 2.5."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import (
    ConfigMixin,
    Cosmos2_5_PredictBasePipeline,
    Cosmos2TextToImagePipeline,
    Cosmos2VideoToWorldPipeline,
    CosmosTextToWorldPipeline,
    CosmosVideoToWorldPipeline,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    ModelMixin,
)

from tests.models import TINY as MODELS
from tests.pipelines import vaes_video
from tests.pipelines.media import image, video
from tests.pipelines.text.qwen import qwen25_vl
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe, no_zeros
from tests.pipelines.wan import unipc


class Unguarded(ModelMixin, ConfigMixin):
    """Replacement for the checker of unsafe content, which is required but large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(1), persistent=False)

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray:
        return frames


def _components(**config: Any) -> dict[str, Any]:
    transformer = MODELS["cosmos"].make(**{"extra_pos_embed_type": None, **config})
    tokenizer, text_encoder = t5()
    return {
        "transformer": no_zeros(transformer.eval()),
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "safety_checker": Unguarded(),
    }


def _first(**config: Any) -> dict[str, Any]:
    """Components of the first Cosmos."""
    scheduler = EDMEulerScheduler(
        sigma_max=80, sigma_schedule="karras", prediction_type="epsilon", final_sigmas_type="sigma_min"
    )
    config = {"extra_pos_embed_type": "learnable", **config}
    return {**_components(**config), "vae": vaes_video.cosmos(), "scheduler": scheduler}


def _second(**config: Any) -> dict[str, Any]:
    """Components of Cosmos 2."""
    scheduler = FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    return {**_components(**config), "vae": vaes_video.wan(), "scheduler": scheduler}


def _text_to_world() -> CosmosTextToWorldPipeline:
    return CosmosTextToWorldPipeline(**_first())


def _video_to_world() -> CosmosVideoToWorldPipeline:
    return CosmosVideoToWorldPipeline(**_first(in_channels=5))


def _text_to_image_2() -> Cosmos2TextToImagePipeline:
    return Cosmos2TextToImagePipeline(**_second())


def _video_to_world_2() -> Cosmos2VideoToWorldPipeline:
    return Cosmos2VideoToWorldPipeline(**_second(in_channels=5))


def _predict_2_5() -> Cosmos2_5_PredictBasePipeline:
    """Its text embeddings are the outputs of all layers, side by side."""
    config = {"in_channels": 5, "text_embed_dim": 32, "use_crossattn_projection": True}
    components = _components(**config, crossattn_proj_in_channels=32, encoder_hidden_states_channels=32)
    tokenizer, text_encoder = qwen25_vl(layers=2)
    return Cosmos2_5_PredictBasePipeline(
        **{**components, "tokenizer": tokenizer, "text_encoder": text_encoder},
        vae=vaes_video.wan(),
        scheduler=unipc(),
    )


def _image_inputs() -> dict[str, Any]:
    """15 patches."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "max_sequence_length": 24,
        "height": 48,
        "width": 80,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "output_type": "latent",
    }


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 patches."""
    return {**_image_inputs(), "num_frames": 9}


def _video_to_world_inputs() -> dict[str, Any]:
    return {**_inputs(), "video": video(3, 48, 80)}


def _image_to_world_inputs() -> dict[str, Any]:
    return {**_inputs(), "image": image(48, 80)}


def _predict_inputs() -> dict[str, Any]:
    return {**_inputs(), "max_sequence_length": 80}


def _predict_video_inputs() -> dict[str, Any]:
    """Five frames of the video are two latent frames of the result."""
    return {**_predict_inputs(), "video": video(9, 48, 80)}


TINY = {
    "cosmos": TinyPipe(_text_to_world, _inputs, "calls", output="frames"),
    "cosmos_video_to_world": TinyPipe(_video_to_world, _video_to_world_inputs, "calls", output="frames"),
    "cosmos2_text_to_image": TinyPipe(_text_to_image_2, _image_inputs, "calls"),
    "cosmos2_video_to_world": TinyPipe(_video_to_world_2, _image_to_world_inputs, "calls", output="frames"),
    "cosmos2_5_predict": TinyPipe(_predict_2_5, _predict_inputs, "calls", output="frames"),
    "cosmos2_5_predict_video": TinyPipe(_predict_2_5, _predict_video_inputs, "calls", output="frames"),
}
