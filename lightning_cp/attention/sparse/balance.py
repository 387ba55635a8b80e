"""Divide the work of a sparse mask between ranks by the order of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_cp.attention.sparse.mask import EMPTY, SparseMask
from lightning_cp.comm.shards import shard_sizes

_GOOD = 1.1  # work of the busiest rank, relative to the mean
_PIECES = 16  # dealt to each rank, at least


def imbalance(mask: SparseMask, lengths: Sequence[int]) -> float:
    """Return the area of the busiest rank, relative to the mean.

    Args: lengths: number of queries on each rank, in the mask's order (`SparseMask.in_order`).
    """
    area = _area_of_queries(mask)
    area = area if mask.orders[0] is None else area[mask.orders[0]]
    starts = [0, *accumulate(lengths)]
    work = [area[a:b].sum().item() for a, b in pairwise(starts)]
    mean = sum(work) / max(len(work), 1)
    return max(work) / mean if mean else 1.0


def balanced_order(mask: SparseMask, ranks: int) -> Tensor | None:
    """Return an order of tokens with which ranks have about equal work; None: the given order is good.

    Tried are the given order, two chunks for each rank, blocks dealt by their work, and pieces of blocks. The first
    with at most 1.1 times the mean on the busiest rank is taken, otherwise the best: orders that keep neighbours
    together need fewer keys of other ranks.

    Args: mask: with as many queries as keys, without an order. ranks: among which the tokens are divided evenly.
    Returns: int64 [tokens], the position of the token at each place, for `SparseMask.in_order` and for the tokens.
    """
    if mask.orders != (None, None) or mask.lengths[0] != mask.lengths[1]:
        raise ValueError(
            f"this mask has {mask.lengths[0]} queries, {mask.lengths[1]} keys and orders {mask.orders}: only a mask "
            "with as many queries as keys, in ascending order, can be balanced"
        )
    tokens = mask.lengths[0]
    sizes = shard_sizes(tokens, ranks)
    whole = mask.block_size[0]
    piece = min(whole, -(-tokens // (_PIECES * ranks)) or 1)  # parts of blocks become partial: the last choice
    orders = (
        torch.arange(tokens, device="cpu"),
        _two_chunks(tokens, ranks),
        _dealt(mask, sizes, whole),
        _dealt(mask, sizes, piece),
    )
    found = [imbalance(mask.in_order(order), sizes) for order in orders]
    best = next((i for i, x in enumerate(found) if x <= _GOOD), found.index(min(found)))
    return None if best == 0 else orders[best]


def _area_of_queries(mask: SparseMask) -> Tensor:
    """Return each query's number of keys in blocks that are not empty, summed over the table's heads, float64."""
    sizes = torch.full((mask.kinds.shape[3],), mask.block_size[1], dtype=torch.float64, device="cpu")
    if len(sizes):
        sizes[-1] = mask.lengths[1] - mask.block_size[1] * (len(sizes) - 1)
    of_blocks = ((mask.kinds > EMPTY) * sizes).sum((0, 1, 3))
    return of_blocks.repeat_interleave(mask.block_size[0])[: mask.lengths[0]]


def _two_chunks(tokens: int, ranks: int) -> Tensor:
    """Cut the tokens into 2 n chunks; rank r gets chunks r and 2 n - 1 - r."""
    chunks = torch.split(torch.arange(tokens, device="cpu"), list(shard_sizes(tokens, 2 * ranks)))
    return torch.cat([torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)])


def _dealt(mask: SparseMask, sizes: Sequence[int], piece: int) -> Tensor:
    """Give each `piece` tokens to the rank with the least work of those with room, the largest first."""
    blocks = torch.split(torch.arange(mask.lengths[0], device="cpu"), piece)
    area = _area_of_queries(mask)
    work = [area[block].sum().item() for block in blocks]
    room, load, given = list(sizes), [0.0] * len(sizes), [[] for _ in sizes]  # type: list[int], list[float], list[list[int]]
    for index in sorted(range(len(blocks)), key=lambda i: (-work[i], i)):
        fitting = [r for r in range(len(sizes)) if room[r] >= len(blocks[index])] or [room.index(max(room))]
        rank = min(fitting, key=lambda r: (load[r], r))
        room[rank] -= len(blocks[index])
        load[rank] += work[index]
        given[rank].append(index)
    return torch.cat([blocks[i] for indices in given for i in sorted(indices)])
