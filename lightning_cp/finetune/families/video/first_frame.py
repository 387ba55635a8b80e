"""First frames that are given to a model that animates pictures: clean, with time 0, and without a loss."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.errors import FamilyError


def check_more_frames(frames: int) -> None:
    """Raise FamilyError if clips have only the frame that is given. Args: frames: number of frames."""
    if frames == 1:
        raise FamilyError("clips must have more than one latent frame: the first one is given and has no loss")


def first_frame_mask(clean: Tensor) -> Tensor:
    """Return True for the first of the latent frames, [1, 1, f, 1, 1]. Args: clean: [b, c, f, h, w].

    Raises: FamilyError: there is one frame only.
    """
    check_more_frames(clean.shape[2])
    given = torch.zeros(clean.shape[2], dtype=torch.bool, device=clean.device)
    given[0] = True
    return given.view(1, 1, -1, 1, 1)
