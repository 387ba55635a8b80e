"""Pack latents to tokens of 2 x 2 latents, as the Flux pipelines, QwenImage and Krea 2 do."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(latents: Tensor) -> Tensor:
    """Convert [b, c, h, w] or [b, c, 1, h, w] to tokens [b, h/2 · w/2, 4c], ordered by row and column.

    The values of a token are ordered by channel, row, column.
    """
    latents = latents.flatten(1, -3)
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Convert tokens [b, n, 4c] to [b, c, height, width]: the inverse of `pack`.

    The first height/2 · width/2 tokens are taken; tokens of reference pictures follow them.
    """
    b, _, values = tokens.shape
    grid = tokens[:, : height * width // 4].reshape(b, height // 2, width // 2, values // 4, 2, 2)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(b, values // 4, height, width)


def positions(rows: int, columns: int, *, device: torch.device) -> Tensor:
    """Return the (0, row, column) positions of a picture's tokens, float32 [rows · columns, 3]."""
    axes = [torch.arange(n, device=device, dtype=torch.float32) for n in (1, rows, columns)]
    return torch.cartesian_prod(*axes)
