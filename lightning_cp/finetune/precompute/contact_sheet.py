"""Decode samples of a cache and draw them on a contact sheet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.finetune.latent_cache import LatentCache
from lightning_cp.sampling.tiles import tile, write_png

_PIXELS = 192  # longer side of a thumbnail


def draw_contact_sheet(decode: Callable[[Tensor], Tensor], cache: LatentCache, path: Path, count: int) -> None:
    """Decode some samples, evenly spaced by id, and draw their middle frames: crops and colours as they are trained.

    Args:
        decode: returns pixels in [0, 1] of stored latents, both with a batch dim.
        count: largest number of samples.
    """
    number = min(count, len(cache))
    thumbnails = []
    for i in range(number):
        pixels = decode(cache.sample(i * len(cache) // number)["latents"][None])
        frame = pixels if pixels.dim() == 4 else pixels[:, :, pixels.shape[2] // 2]
        height, width = frame.shape[-2:]
        scale = _PIXELS / max(height, width)
        size = [max(1, round(side * scale)) for side in (height, width)]
        small = F.interpolate(frame.cpu(), size=size, mode="bilinear", antialias=True).clamp(0, 1)
        thumbnail = torch.ones(1, 3, _PIXELS, _PIXELS)
        thumbnail[:, :, : size[0], : size[1]] = small
        thumbnails.append(thumbnail)
    write_png(tile(torch.cat(thumbnails), value_range=(0.0, 1.0)), path)
