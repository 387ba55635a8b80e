"""Common inputs of tiny pipelines."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import nn

from tests.pipelines.tiny import no_zeros

PROMPT = "a small red cat"
NEGATIVE = "blurry"
PROMPTS = [PROMPT, "two green birds fly"]
NEGATIVES = [NEGATIVE, "dark picture"]


def asked(height: int, width: int, **others: Any) -> dict[str, Any]:
    """The arguments that almost every call has: two steps, and latents as the result."""
    arguments = {"prompt": PROMPT, "height": height, "width": width, "num_inference_steps": 2, "output_type": "latent"}
    return {**arguments, **others}


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """An image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def mask(height: int, width: int) -> Image.Image:
    """A mask of the left third."""
    values = np.zeros((height, width), dtype=np.uint8)
    values[:, : width // 3] = 255
    return Image.fromarray(values)


def flow_match(**others: Any) -> FlowMatchEulerDiscreteScheduler:
    """The scheduler of most pipelines."""
    return FlowMatchEulerDiscreteScheduler(**others)


def loud(module: nn.Module, gain: float = 2.0) -> nn.Module:
    """`no_zeros` in eval mode, with larger matrices: at their usual size the text hardly changes the latents."""
    no_zeros(module)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(gain)
    return module.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of diffusers about its own imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _quietly(set_timesteps: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_timesteps)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            set_timesteps(*args, **kwargs)

    return wrapped


class MultistepScheduler(DPMSolverMultistepScheduler):
    """A scheduler that looks back on former steps, without its warning about numpy."""

    set_timesteps = _quietly(DPMSolverMultistepScheduler.set_timesteps)


class FlowMatchScheduler(FlowMatchEulerDiscreteScheduler):
    """A scheduler that takes tensors of sigmas without its warning about numpy."""

    set_timesteps = _quietly(FlowMatchEulerDiscreteScheduler.set_timesteps)
