"""Divide the elements of a transformer's result into pieces, one for each patch or each group of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.comm.packet import Layout

# For each tensor of a result, the flat positions [n] of a piece's elements.
Positions = list[Tensor]


class ResultPieces(NamedTuple):
    """The pieces of a result.

    Attributes:
        numbers: for each tensor, the number of the piece of each element, int16 on the host.
        positions: for each piece, the positions of its elements, on the device of the result.
    """

    numbers: list[Tensor]
    positions: list[Positions]


def parts_of_patches(known: Sequence[Sequence[Tensor]]) -> list[Tensor] | None:
    """Return for each tensor of a result the number of the patch that completes each element, int16 [elements].

    Args: known: for each patch, where each tensor is known when this patch is computed.
    Returns: None if this is not known for all of them.
    """
    if not known or not all(known):
        return None
    numbers = [torch.full(x.shape, len(known) - 1, dtype=torch.int16, device=x.device) for x in known[0]]
    for number in reversed(range(len(known) - 1)):
        for parts, mask in zip(numbers, known[number], strict=True):
            parts[mask] = number
    return [x.flatten().cpu() for x in numbers]


def parts_of_samples(layout: Layout, sizes: Sequence[int]) -> list[Tensor] | None:
    """Return for each tensor of a result the number of the micro-batch of each element, int16 [elements].

    Args: layout: layout of the whole result. sizes: number of samples of each micro-batch.
    Returns: None if this is not clear from the shapes.
    """
    numbers = torch.arange(len(sizes), dtype=torch.int16).repeat_interleave(torch.tensor(sizes))
    by_row = all(piece.shape and piece.shape[0] == len(numbers) for piece in layout)
    by_tensor = len(layout) == len(numbers)
    if by_row == by_tensor:
        return None
    rows = [numbers] * len(layout) if by_row else list(numbers[:, None])
    return [x.repeat_interleave(piece.elements // len(x)) for x, piece in zip(rows, layout, strict=True)]


def positions_of(parts: Sequence[Tensor], pieces: int, device: torch.device) -> list[Positions]:
    """Return the positions of each piece's elements, from the number of the piece of each element.

    A patch may have none: for example, only tokens of padding.
    """
    return [[(x == number).nonzero().flatten().to(device) for x in parts] for number in range(pieces)]
