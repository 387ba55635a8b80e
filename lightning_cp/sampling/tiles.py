"""Tile pictures or clips into one picture."""

import math
from pathlib import Path

import torch
from torch import Tensor

from lightning_cp.files import writing, writing_new


def tile(samples: Tensor, *, value_range: tuple[float, float] = (-1.0, 1.0), margin: int = 2) -> Tensor:
    """Arrange pictures in a grid, or clips as one row of frames each.

    Args:
        samples: pictures [n, c, h, w] or clips [n, c, f, h, w]; c is 1 (grey), 3 (RGB) or 4 (RGBA).
        value_range: values of black and white; values outside are clamped.
        margin: white pixels between neighbours.
    Returns: picture [height, width, 3 or 4], uint8, on the CPU.
    Raises: ValueError: the samples have another shape.
    """
    if samples.ndim not in (4, 5) or samples.shape[1] not in (1, 3, 4) or not samples.numel():
        raise ValueError(
            f"samples of shape {tuple(samples.shape)} must be [n, c, h, w] or [n, c, f, h, w] with c = 1, 3 or 4"
        )
    low, high = value_range
    pixels = ((samples.detach().float().cpu() - low) / (high - low)).nan_to_num(0).clamp(0, 1)
    if pixels.shape[1] == 1:
        pixels = pixels.expand(-1, 3, *(-1 for _ in pixels.shape[2:]))
    if pixels.ndim == 5:
        columns, frames = pixels.shape[2], pixels.transpose(1, 2).flatten(0, 1)
    else:
        columns, frames = math.ceil(math.sqrt(len(pixels))), pixels
    rows = -(-len(frames) // columns)
    _, channels, height, width = frames.shape
    sheet = torch.ones(rows * columns, channels, height + margin, width + margin)
    sheet[: len(frames), :, :height, :width] = frames
    grid = sheet.view(rows, columns, channels, height + margin, width + margin).permute(0, 3, 1, 4, 2)
    grid = grid.reshape(rows * (height + margin), columns * (width + margin), channels)
    return (grid[: grid.shape[0] - margin, : grid.shape[1] - margin] * 255).round().to(torch.uint8)


def write_png(picture: Tensor, path: Path) -> None:
    """Write a picture [height, width, 3 or 4], uint8, as a PNG."""
    from PIL import Image  # a dependency of diffusers

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with writing_new(path):
        Image.fromarray(picture.numpy()).save(path)
