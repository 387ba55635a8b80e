"""Attention masks that are the outer product of a mask of tokens with itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_cp.comm.shards import gather_shards
from lightning_cp.mesh.groups import MeshGroups


def token_mask(mask: Tensor) -> Tensor:
    """Return the mask of the tokens [..., s] from its outer product [..., s, s]: the diagonal holds the squares."""
    squares = mask.diagonal(dim1=-2, dim2=-1)
    return squares.sqrt() if squares.is_floating_point() else squares


def gather_token_mask(mask: Tensor, lengths: Sequence[int], groups: MeshGroups) -> Tensor:
    """All-gather the mask of the tokens [..., s_local], in rank order.

    Args: lengths: number of tokens on each rank. Ranks: all of the context group.
    """
    values = mask if mask.is_floating_point() else mask.to(torch.uint8)
    return gather_shards(values.contiguous(), values.ndim - 1, list(lengths), groups.name).to(mask.dtype)


def outer_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the outer product [..., q, k] of the masks of queries and keys."""
    return queries.unsqueeze(-1) * keys.unsqueeze(-2)
