"""Attention over tiles: one call of an ordinary kernel for neighbouring rows of tiles with the same kinds.

A row's full tiles are computed without a mask and its partial tiles with one, and both are merged. Empty tiles cost
nothing. On CUDA, `flex.py` computes all tiles in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.attention.merge import accumulator, merge
from lightning_cp.attention.sparse.mask import FULL, PARTIAL
from lightning_cp.attention.sparse.tiles import Tiles
from lightning_cp.kernels import (
    Grads,
    Kernel,
    PartialAttention,
    PartialAttentionGrad,
    accumulation_dtype_of,
    attend,
    attend_backward,
)

KernelFor = Callable[[Tensor | None], Kernel]  # the kernel for a mask, or for none


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
    return tiles.keep(queries_per_key, lambda: list(_find_rows(tiles, queries_per_key)))


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
