"""Add noise to the first frames of clips, as in the training of CogVideoX image to video."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from lightning_cp.data.keyed_random import RandomStream, keyed_generator

_MEAN, _STD = -3.0, 0.5  # of the logarithm of the noise's standard deviation, in pixels from -1 to 1


def noised_frame(pixels: Tensor, name: str) -> Tensor:
    """Return the first frame with noise of a random strength, about 0.05. It depends on the sample's name only.

    Args: pixels: [3, f, h, w] in [-1, 1].
    Returns: [3, 1, h, w], not cut to [-1, 1].
    Source: Yang et al., CogVideoX, arXiv:2408.06072, section on image to video.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    generator = keyed_generator(seed, RandomStream.IMAGE_NOISE)
    strength = math.exp(_MEAN + _STD * generator.standard_normal())
    frame = pixels[:, :1]
    noise = torch.from_numpy(generator.standard_normal(tuple(frame.shape), dtype="float32"))
    return frame + strength * noise
