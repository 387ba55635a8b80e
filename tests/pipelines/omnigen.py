"""OmniGen, with a text only, and with input images for several prompts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, OmniGenPipeline
from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen
from PIL import Image
from torch import Tensor

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, loud, picture
from tests.pipelines.text.llama import tokenizer
from tests.pipelines.tiny import TinyPipe


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image, dtype=np.float32) / 255).permute(2, 0, 1)


def _composed(steps: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def apply(value: Any) -> Any:
        for step in steps:
            value = step(value)
        return value

    return apply


# Replaces torchvision, which the tests do not need for anything else.
_TRANSFORMS = SimpleNamespace(
    Compose=_composed,
    Lambda=lambda function: function,
    ToTensor=lambda: _to_tensor,
    Normalize=lambda mean, std, inplace: lambda x: (x - mean[0]) / std[0],
)


def _omnigen() -> OmniGenPipeline:
    words = tokenizer(max_length=1024)
    processor_omnigen.transforms = _TRANSFORMS
    pipeline_omnigen.OmniGenMultiModalProcessor = processor_omnigen.OmniGenMultiModalProcessor
    return OmniGenPipeline(
        transformer=loud(MODELS["omnigen"].make(vocab_size=len(words))),
        vae=vaes.kl(levels=4),
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        tokenizer=words,
    )


def _inputs() -> dict[str, Any]:
    """Texts of different lengths: the class takes the positions of the first sample, which differ from the others'."""
    return {
        "prompt": "a cat",
        "height": 48,
        "width": 80,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "output_type": "latent",
    }


def _with_images() -> dict[str, Any]:
    """One image for the first prompt and two for the second: three branches."""
    both = "<img><|image_1|></img> and <img><|image_2|></img>"
    return {
        **_inputs(),
        "prompt": ["draw <img><|image_1|></img>", f"mix {both} {NEGATIVE}"],
        "input_images": [[picture(32, 48)], [picture(32, 32, seed=1), picture(48, 32, seed=2)]],
        "img_guidance_scale": 1.6,
        "max_input_image_size": 64,
    }


TINY = {
    "omnigen": TinyPipe(_omnigen, _inputs, "batch"),
    "omnigen_images": TinyPipe(_omnigen, _with_images, "batch"),
}
