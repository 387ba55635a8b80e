"""A sparse mask seen from one rank: tiles of its queries and of some keys, and attention over them by ordinary kernels.

A tile is empty, partial or full. Neighbouring rows of tiles with the same kinds are one call of a kernel: a row's full
tiles are computed without a mask, its partial tiles with one, and both are merged. Empty tiles cost nothing. On CUDA,
`flex.py` computes all tiles in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.attention.merge import accumulator, merge
from lightning_cp.attention.sparse.mask import EMPTY, EVALUATED, FULL, PARTIAL, SparseMask, all_of, any_of
from lightning_cp.kernels import (
    Grads,
    Kernel,
    PartialAttention,
    PartialAttentionGrad,
    accumulation_dtype_of,
    attend,
    attend_backward,
)
from lightning_cp.mesh.groups import Memo

CUDA_TILE = 128  # of the CUDA kernel
KernelFor = Callable[[Tensor | None], Kernel]  # the kernel for a mask, or for none


@dataclass(frozen=True, eq=False)
class Tiles(Memo):
    """Mask of some queries over some keys, in tiles of `size` queries and keys; the last ones may be smaller.

    Attributes:
        kinds: uint8 on the host, [batch or 1, heads or 1, tiles of queries, tiles of keys]: empty, partial or full.
        bits: bool [2 + partial tiles, *size]: the mask within tiles; bits[0] is empty, bits[1] full. Rows and columns
            after the last query or key are False.
        index: int32, shaped as `kinds`: the place of each tile in `bits`.
        lengths: number of queries and of keys.
    """

    kinds: Tensor
    bits: Tensor
    index: Tensor
    size: tuple[int, int]
    lengths: tuple[int, int]
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def is_empty(self) -> bool:
        """True if no query attends to a key."""
        return not bool(self.kinds.any())

    def dense(self, b: int, h: int, rows: slice, columns: Tensor | None = None) -> Tensor:
        """Return the mask of some tiles, bool [queries, keys].

        Args: rows: tiles of queries. columns: tiles of keys, ascending; None: all.
        """
        index = self.index[b, h, rows] if columns is None else self.index[b, h, rows][:, columns]
        tiles = self.bits[index.to(self.bits.device).long()]
        mask = tiles.transpose(1, 2).flatten(2).flatten(0, 1)
        last_column = self.kinds.shape[3]
        queries = min(rows.stop * self.size[0], self.lengths[0]) - rows.start * self.size[0]
        ends_last = columns is None or int(columns[-1]) == last_column - 1
        return mask[:queries, : mask.shape[1] - (last_column * self.size[1] - self.lengths[1] if ends_last else 0)]

    def whole(self) -> Tensor:
        """Return the whole mask, bool [batch or 1, heads or 1, queries, keys]."""
        batch, heads, rows, _ = self.kinds.shape
        masks = [torch.stack([self.dense(b, h, slice(0, rows)) for h in range(heads)]) for b in range(batch)]
        return torch.stack(masks)


def tiles_of(mask: SparseMask, queries: Tensor, keys: Tensor, *, heads: slice, device: torch.device) -> Tiles:
    """Find the kind of each tile of some queries and keys; evaluate the mask where the table does not decide.

    Args: queries, keys: positions, int64 on the host. heads: heads of the table.
    """
    size = (CUDA_TILE, CUDA_TILE) if device.type == "cuda" else mask.block_size
    table = mask.kinds[:, heads]
    shape = tuple(-(-len(x) // n) for x, n in zip((queries, keys), size, strict=True))
    if not (len(queries) and len(keys)):
        kinds = torch.zeros(*table.shape[:2], *shape, dtype=torch.uint8, device="cpu")
        bits = torch.zeros(2, *size, dtype=torch.bool, device=device)
        return Tiles(kinds, bits, kinds.int(), size, (len(queries), len(keys)))
    rows, columns = (
        _touched(x, n, b, m) for x, n, b, m in zip((queries, keys), size, mask.block_size, table.shape[2:], strict=True)
    )
    some = rows @ (table > EMPTY).type_as(rows) @ columns.T > 0
    every = rows @ (table < FULL).type_as(rows) @ columns.T == 0
    decided = rows @ (table != PARTIAL).type_as(rows) @ columns.T > 0  # the table decides some pairs of the tile
    kinds = some.to(torch.uint8) + (some & every).to(torch.uint8)
    places = (kinds == PARTIAL).nonzero()
    q, k = (_padded(x, n) for x, n in zip((queries, keys), size, strict=True))
    index, evaluated, found = kinds.int().div(FULL, rounding_mode="floor"), [], 2
    for group in torch.split(places, max(1, EVALUATED // (size[0] * size[1]))):
        b, h, i, j = group.unbind(1)
        partial = not bool(decided[b, h, i, j].any())
        inside = ((q[i] >= 0)[:, :, None] & (k[j] >= 0)[:, None]).to(mask.device)
        head = (h + heads.start)[:, None, None]
        positions = q[i].clamp(min=0)[:, :, None], k[j].clamp(min=0)[:, None]
        tile = mask.visible(b[:, None, None], head, *positions, in_partial_blocks=partial) & inside
        every_one, some_one = all_of(all_of(tile | ~inside, 1), 1).cpu(), any_of(any_of(tile, 1), 1).cpu()
        is_partial = some_one & ~every_one
        kinds[b, h, i, j] = (some_one.to(torch.uint8) + every_one.to(torch.uint8)).clamp_(max=FULL) * some_one
        index[b, h, i, j] = every_one.int() * some_one
        count = int(is_partial.sum())
        index[tuple(group[is_partial].unbind(1))] = torch.arange(found, found + count, dtype=torch.int32, device="cpu")
        found += count
        evaluated.append(tile[is_partial.to(tile.device)].to(device))
    empty = torch.zeros(1, *size, dtype=torch.bool, device=device)
    return Tiles(kinds, torch.cat([empty, ~empty, *evaluated]), index, size, (len(queries), len(keys)))


def _touched(positions: Tensor, tile: int, block: int, blocks: int) -> Tensor:
    """Return whether a tile of positions has one of a block, float [tiles, blocks]."""
    tiles = torch.arange(len(positions), device="cpu") // tile
    touched = torch.zeros(int(tiles[-1]) + 1, blocks, dtype=torch.float32, device="cpu")  # whatever the default dtype
    touched[tiles, positions // block] = 1
    return touched


def _padded(positions: Tensor, tile: int) -> Tensor:
    """Return positions in tiles, [tiles, tile], with -1 after the last."""
    return torch.nn.functional.pad(positions, (0, -len(positions) % tile), value=-1).view(-1, tile)


class _Run(NamedTuple):
    """Queries and keys of one kernel call.

    Attributes:
        samples, heads, kv_heads: indices; of all samples or heads if the mask is the same for them.
        queries: range of queries.
        keys: ranges of keys.
        mask: bool [1, 1, queries, keys]; None: all queries attend to all keys.
    """

    samples: slice
    heads: slice
    kv_heads: slice
    queries: slice
    keys: tuple[slice, ...]
    mask: Tensor | None

    def of_queries(self, x: Tensor) -> Tensor:
        """Select from a tensor shaped like queries [b, sq, hq, …]."""
        return x[self.samples, self.queries, self.heads]

    def of_keys(self, x: Tensor) -> list[Tensor]:
        """Select the ranges of keys from a tensor [b, hk, sk, d]."""
        x = x[self.samples, self.kv_heads]
        return [x[:, :, keys] for keys in self.keys]

    def joined_keys(self, x: Tensor) -> Tensor:
        """Select from a tensor [b, hk, sk, d]. Returns: [b, keys, heads, d]; the tokens of a head are neighbours."""
        parts = self.of_keys(x)
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).transpose(1, 2)


def attend_runs(
    kernel_for: KernelFor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, *, scale: float
) -> PartialAttention:
    """Compute attention of q over k and v.

    Args:
        kernel_for: see `KernelFor`.
        q: [b, sq, hq, d].
        k, v: [b, sk, hk, d].
        tiles: the mask.
        scale: factor on the scores q k.
    Returns: out in q's dtype; queries without a key: out 0, lse -inf.
    """
    dtype = accumulation_dtype_of(q.dtype)
    k, v = _by_head(k), _by_head(v)
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
    for runs in _rows(tiles, q.shape[2] // k.shape[1]):
        parts = [
            attend(
                kernel_for(run.mask),
                run.of_queries(q),
                run.joined_keys(k),
                run.joined_keys(v),
                mask=run.mask,
                causal=False,
                scale=scale,
            )
            for run in runs
        ]
        part = parts[0] if len(parts) == 1 else merge(accumulator(parts[0], dtype), parts[1])
        runs[0].of_queries(out).copy_(part.out)
        runs[0].of_queries(lse).copy_(part.lse)
    return PartialAttention(out, lse)


def attend_runs_backward(
    kernel_for: KernelFor,
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    tiles: Tiles,
    *,
    scale: float,
) -> Grads:
    """Compute the gradients of q, k and v through these keys.

    Args: part: out and lse over these keys and any others. grad: gradients of out and lse. Others: see `attend_runs`.
    Returns: gradients in the accumulation dtype.
    """
    dtype = accumulation_dtype_of(q.dtype)
    k, v = _by_head(k), _by_head(v)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for run in (run for runs in _rows(tiles, q.shape[2] // k.shape[1]) for run in runs):
        grads = attend_backward(
            kernel_for(run.mask),
            PartialAttentionGrad(*(None if x is None else run.of_queries(x) for x in grad)),  # type: ignore[arg-type]
            run.of_queries(q),
            run.joined_keys(k),
            run.joined_keys(v),
            PartialAttention(*map(run.of_queries, part)),
            mask=run.mask,
            causal=False,
            scale=scale,
        )
        run.of_queries(dq).add_(grads.query)
        sizes = [keys.stop - keys.start for keys in run.keys]
        for total, x in ((dk, grads.key), (dv, grads.value)):
            for own, piece in zip(run.of_keys(total), torch.split(x.transpose(1, 2), sizes, 2), strict=True):
                own.add_(piece)
    return Grads(dq, dk.transpose(1, 2), dv.transpose(1, 2))


def _by_head(x: Tensor) -> Tensor:
    """Transpose [b, s, h, d] -> [b, h, s, d] in memory: each key is used in several calls, and kernels need it so."""
    return x.transpose(1, 2).contiguous()


def _rows(tiles: Tiles, queries_per_key: int) -> list[list[_Run]]:
    """List the kernel calls of each range of queries that attends to a key: full tiles, partial tiles."""
    return tiles.memoize(queries_per_key, lambda: list(_find_rows(tiles, queries_per_key)))


def _find_rows(tiles: Tiles, queries_per_key: int) -> Iterator[list[_Run]]:
    batch, heads, rows, _ = tiles.kinds.shape
    for b in range(batch):
        samples = slice(None) if batch == 1 else slice(b, b + 1)
        for h in range(heads):
            of_heads = (slice(None),) * 2
            if heads > 1:
                of_heads = slice(h, h + 1), slice(h // queries_per_key, h // queries_per_key + 1)
            kinds = tiles.kinds[b, h]
            changes = (kinds[1:] != kinds[:-1]).any(1).nonzero()[:, 0] + 1
            bounds = [0, *changes.tolist(), rows]
            for first, last in pairwise(bounds):
                queries = slice(first * tiles.size[0], min(last * tiles.size[0], tiles.lengths[0]))
                runs = []
                for kind in (FULL, PARTIAL):
                    columns = (kinds[first] == kind).nonzero()[:, 0]
                    if len(columns):
                        mask = None if kind == FULL else tiles.dense(b, h, slice(first, last), columns)[None, None]
                        keys = _ranges(columns.tolist(), tiles.size[1], tiles.lengths[1])
                        runs.append(_Run(samples, *of_heads, queries, keys, mask))
                if runs:
                    yield runs


def _ranges(columns: list[int], size: int, length: int) -> tuple[slice, ...]:
    """Return the ranges of keys of ascending tiles; neighbouring tiles make one range."""
    bounds: list[list[int]] = []
    for column in columns:
        if bounds and bounds[-1][1] == column:
            bounds[-1][1] = column + 1
        else:
            bounds.append([column, column + 1])
    return tuple(slice(a * size, min(b * size, length)) for a, b in bounds)
