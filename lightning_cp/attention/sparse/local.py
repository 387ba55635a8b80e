"""A sparse mask for one rank: tiles of its queries over keys of its ring, attention over them, and balanced orders."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_cp.attention.heads import Heads
from lightning_cp.attention.sparse.mask import EMPTY, FULL, PARTIAL, SparseMask
from lightning_cp.attention.sparse.needed import Needs, find_needs
from lightning_cp.attention.sparse.tiles import KernelFor, Tiles, attend_runs, attend_runs_backward, tiles_of
from lightning_cp.comm.shards import shard_sizes
from lightning_cp.kernels import Grads, PartialAttention, PartialAttentionGrad
from lightning_cp.mesh.groups import Memo

NEEDED = range(-1, -1)  # the keys that this rank receives of others; compare its start: empty ranges are equal
_log = logging.getLogger("lightning_cp")
_LOGGED = 8  # messages in a process
# Of a kernel call for one run of tiles, of a partial tile in it, and of a tile in flex attention: time on an H200 with
# bfloat16, relative to a full tile in cuDNN's kernel, which computes about 600 TFLOP/s
_CALL_S, _PARTIAL_TILE, _FLEX_TILE, _FLOPS = 60e-6, 8.0, 2.0, 600e12
_GOOD = 1.1  # work of the busiest rank, relative to the mean
_PIECES = 16  # dealt to each rank, at least


class LocalMask(Memo):
    """A sparse mask for the queries of one rank and the keys of its ring.

    Args:
        mask: the mask of the whole sequence.
        queries, keys: number of queries and of keys on each rank of the ring, in rank order. Where a ring has
            several ranks of a Ulysses group, their sum. On a grid: queries of each row, and keys of all its ranks.
        rank: this rank's index in the ring.
        heads: query heads of the ring.
        device: device of query, key and value.
        column: which of `keys` are those of the ring.
    """

    def __init__(
        self,
        mask: SparseMask,
        queries: Sequence[int],
        keys: Sequence[int],
        *,
        rank: int,
        heads: slice,
        device: torch.device,
        column: slice = slice(None),
    ) -> None:
        orders = (
            torch.arange(length, device="cpu") if order is None else order
            for order, length in zip(mask.orders, mask.lengths, strict=True)
        )
        by_rank = [torch.split(x, list(sizes)) for x, sizes in zip(orders, (queries, keys), strict=True)]
        by_rank[1], keys = by_rank[1][column], keys[column]
        self._queries, self._keys = by_rank[0][rank], torch.cat(by_rank[1])
        self._mask = mask.copy(keeps=False)  # what the mask keeps refers to this object
        self._heads = heads if mask.kinds.shape[1] > 1 else slice(0, 1)
        self._device = device
        self.needs: Needs = find_needs(mask, *by_rank, rank=rank, heads=self._heads, device=device)
        self.sends_few = self.needs.largest <= 2 * max(keys)  # not more than two chunks of a ring
        if rank == heads.start == 0 and len(keys) > 1 and _note_once.cache_info().currsize < _LOGGED:
            _note_needs(self, mask, queries, keys)
        self.memo = {}

    def tiles(self, heads: Heads, keys: range) -> Tiles:
        """Return the tiles of this rank's queries over some keys, found once.

        Args: heads: among the ring's. keys: places among the ring's keys, or `NEEDED`.
        """
        own = self._heads
        if own.stop - own.start > 1:
            own = slice(own.start + heads.query.start, own.start + heads.query.stop)

        def build() -> Tiles:
            positions = self._keys[self.needs.received] if keys.start < 0 else self._keys[keys.start : keys.stop]
            return tiles_of(self._mask, self._queries, positions, heads=own, device=self._device)

        return self.memoize((own.start, own.stop, keys.start, keys.stop), build)


def _note_needs(local: LocalMask, mask: SparseMask, queries: Sequence[int], keys: Sequence[int]) -> None:
    """Log what the first masks need: masks that are made in each forward differ each time."""
    largest, others = local.needs.largest, sum(keys) - min(keys)
    _note_once(
        f"block mask of {mask.lengths[0]} x {mask.lengths[1]} tokens: {mask.area:.2f} of the work of dense attention, "
        f"{imbalance(mask, queries):.2f} times the mean on the busiest of {len(keys)} ranks; a rank needs up to "
        f"{largest} of {others} keys of others, and {'only these' if local.sends_few else 'with alltoall all'} are sent"
    )


@cache
def _note_once(message: str) -> None:
    _log.info(message)


def attend_tiles(
    kernel_for: KernelFor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, *, scale: float, kernel: str
) -> PartialAttention:
    """Compute attention of q over k and v with the fastest way for the device.

    Args: kernel: the kernel setting; "auto" allows flex attention. Others, Returns: see `attend_runs`.
    """
    if _uses_flex(q, tiles, kernel):
        from lightning_cp.attention.sparse.flex import attend_flex

        return attend_flex(q, k, v, tiles, scale=scale)
    return attend_runs(kernel_for, q, k, v, tiles, scale=scale)


def attend_tiles_backward(
    kernel_for: KernelFor,
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    tiles: Tiles,
    *,
    scale: float,
    kernel: str,
) -> Grads:
    """Compute the gradients of `attend_tiles`. Args, Returns: see `attend_runs_backward`."""
    if _uses_flex(q, tiles, kernel):
        from lightning_cp.attention.sparse.flex import attend_flex_backward

        return attend_flex_backward(grad, q, k, v, part, tiles, scale=scale)
    return attend_runs_backward(kernel_for, grad, q, k, v, part, tiles, scale=scale)


def _uses_flex(q: Tensor, tiles: Tiles, kernel: str) -> bool:
    if not q.is_cuda or kernel != "auto":
        return False
    from lightning_cp.attention.sparse.flex import is_supported

    facts = q.shape[0], *q.shape[2:], q.dtype
    return tiles.memoize(facts, lambda: is_supported(q) and not is_faster_in_runs(tiles, q.shape[0], *q.shape[2:]))


def is_faster_in_runs(tiles: Tiles, batch: int, heads: int, head_dim: int) -> bool:
    """Estimate whether a kernel call for each run of tiles is faster than flex attention, on a GPU.

    It is for masks of whole frames or large documents, with few large runs, and not for windows of tokens.
    """
    kinds = tiles.kinds
    repeats = batch * heads / (kinds.shape[0] * kinds.shape[1])
    tile_s = 4 * tiles.size[0] * tiles.size[1] * head_dim * repeats / _FLOPS
    full, partial = ((kinds == kind).sum().item() for kind in (FULL, PARTIAL))
    rows = (kinds[:, :, 1:] != kinds[:, :, :-1]).any(-1).sum().item() + kinds.shape[0] * kinds.shape[1]
    calls = rows * (2 if partial else 1)
    return calls * _CALL_S + tile_s * (full + _PARTIAL_TILE * partial) < _FLEX_TILE * tile_s * (full + partial)


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
