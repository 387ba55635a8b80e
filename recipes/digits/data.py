"""Data sets of scikit-learn's 1,797 scanned digits: still pictures, and clips of moving digits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_cp.data.keyed_random import RandomStream, keyed_generator

DIGIT_SIZE = 8
NUM_CLASSES = 10
NUM_SCANS = 1797


def are_digits(data: Mapping[str, Any]) -> bool:
    """Return whether the settings `data` describe scanned digits, which `recognise_digits` can classify."""
    count = data.get("num_samples")
    return (data["channels"], data["num_classes"]) == (1, NUM_CLASSES) and count == NUM_SCANS - data.get("held_out", 0)


@dataclass(frozen=True)
class Scans:
    """The scans: pixels [n, 8, 8] in [-1, 1] (ink is 1), labels [n]."""

    pixels: Tensor
    labels: Tensor


def load_scans() -> Scans:
    """Read the scans from the installed scikit-learn package; nothing is downloaded."""
    from sklearn.datasets import load_digits  # here, so that the samplers can be used without scikit-learn

    digits = load_digits()
    return Scans(
        pixels=torch.from_numpy(digits.images).float() / 8.0 - 1.0, labels=torch.from_numpy(digits.target).long()
    )


class Digits(Dataset[tuple[Tensor, int]]):
    """The scans as one-frame clips. Item: (pixels [1, 1, 8, 8] in [-1, 1], label).

    Args: held_out: number of scans that are left out, the last ones.
    """

    sample_shape = (1, 1, DIGIT_SIZE, DIGIT_SIZE)

    def __init__(self, held_out: int = 0) -> None:
        if not 0 <= held_out < NUM_SCANS:
            raise ValueError(f"held_out={held_out} must be at least 0 and less than {NUM_SCANS}, the number of scans")
        self.held_out = held_out

    @cached_property
    def _scans(self) -> Scans:
        return load_scans()

    def __len__(self) -> int:
        return len(self._scans.labels) - self.held_out

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._scans.pixels[index][None, None], int(self._scans.labels[index])


class MovingDigits(Dataset[tuple[Tensor, int]]):
    """Clips of one scanned digit each, moving over a canvas and bouncing off its edges.

    Clip i shows scan i. Its start position and speed depend only on (seed, i).
    Item: (pixels [1, frames, height, width] in [-1, 1], label).

    Args:
        frames: number of frames per clip.
        height: canvas height in pixels.
        width: canvas width in pixels.
        max_speed: largest speed along each axis, in pixels per frame.
        seed: seed of the motion.
    """

    def __init__(self, frames: int, height: int, width: int, *, max_speed: int = 2, seed: int = 0) -> None:
        if frames < 1 or min(height, width) < DIGIT_SIZE:
            raise ValueError(
                f"frames={frames}, height={height}, width={width} must be at least 1 frame of {DIGIT_SIZE} x "
                f"{DIGIT_SIZE} pixels"
            )
        self.frames, self.height, self.width = frames, height, width
        self.max_speed = max_speed
        self.seed = seed
        self.sample_shape = (1, frames, height, width)

    @cached_property
    def _scans(self) -> Scans:
        return load_scans()

    def __len__(self) -> int:
        return len(self._scans.labels)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        clip = torch.full(self.sample_shape, -1.0)
        for frame, (top, left) in enumerate(self._path(index)):
            clip[0, frame, top : top + DIGIT_SIZE, left : left + DIGIT_SIZE] = self._scans.pixels[index]
        return clip, int(self._scans.labels[index])

    def _path(self, index: int) -> npt.NDArray[np.int64]:
        """Return the (top, left) corner of the digit in each frame, [frames, 2]."""
        generator = keyed_generator(self.seed, RandomStream.CLIP, index=index)
        room = np.array([self.height - DIGIT_SIZE, self.width - DIGIT_SIZE])
        start = generator.integers(0, room + 1)
        speed = generator.integers(-self.max_speed, self.max_speed + 1, size=2)
        straight = start + np.arange(self.frames)[:, None] * speed
        period = np.maximum(2 * room, 1)
        folded = straight % period  # a bounce is a straight path folded back at the edges
        path: npt.NDArray[np.int64] = np.where(folded > room, period - folded, folded)
        return path
