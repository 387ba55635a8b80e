"""Attention of the local queries over one chunk of keys, its gradients and tangents, and the merge of chunks.

Used by the ring (`ring.py`) and by gathered attention (`gathered.py`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.attention.heads import Heads
from lightning_cp.attention.merge import accumulator, merge
from lightning_cp.attention.sparse.local import LocalMask, attend_tiles, attend_tiles_backward
from lightning_cp.attention.sparse.tiles import Tiles
from lightning_cp.kernels import (
    Grads,
    Inputs,
    Kernel,
    PartialAttention,
    PartialAttentionGrad,
    accumulation_dtype_of,
    attend,
    attend_backward,
    attend_tangents,
    choose_kernel,
    choose_tangent_kernel,
)


@dataclass(frozen=True)
class Row:
    """Settings of a row of a grid of ranks (`grid.py`).

    Attributes:
        group: process group of the row.
        q_lengths: number of queries on each rank of the row, in rank order.
        mask_query_sizes: size of the query dim of each rank's mask.
        keys: for each rank of the row, the global positions of the keys of its column, a range for each rank of that.
    """

    group: dist.ProcessGroup
    q_lengths: tuple[int, ...]
    mask_query_sizes: tuple[int, ...]
    keys: tuple[tuple[range, ...], ...]


@dataclass(frozen=True)
class Ring:
    """Settings of one attention over the keys of a ring of ranks. On a grid, the ring is this rank's column.

    Attributes:
        group: process group of the ring; None for a ring of one rank.
        q_start: global position of the first local query; on a grid, of the first query of the row.
        kv_lengths: number of keys on each rank of the ring, in rank order.
        mask_kind: "key_mask": mask of the local keys, sent with them; "query_mask": mask of the local queries over
            all keys; "": no mask.
        causal: a query sees keys up to its own global position.
        scale: factor on q k.
        kernel: one of `kernels.KERNEL_NAMES`.
        rotate_method: "allgather" (`gathered.py`), "alltoall" (`ring.py`) or "grid" (as "allgather").
        accumulate_fp32: True: merge and sum in float32 (float64 for float64 inputs). False: in the inputs' dtype.
        sparse: the sparse mask for this rank; None: no such mask.
        row: this rank's row; None: the ring is no column of a grid.
        kv_starts: global position of the first key of each rank of the ring; empty: they are contiguous.
    """

    group: dist.ProcessGroup | None
    q_start: int
    kv_lengths: tuple[int, ...]
    mask_kind: str
    causal: bool
    scale: float
    kernel: str
    rotate_method: str
    accumulate_fp32: bool
    sparse: LocalMask | None = None
    row: Row | None = None
    kv_starts: tuple[int, ...] = ()
    chosen: dict[Hashable, Kernel] = field(default_factory=dict, repr=False, compare=False)

    def kernel_for(self, query: Tensor, mask: Tensor | None) -> Kernel:
        """Return the kernel for a chunk of keys, see `choose_kernel`; chosen once for tensors of one kind."""
        facts = (query.dtype, query.device, query.shape[-1], mask is None)
        kernel = self.chosen.get(facts)
        if kernel is None:
            kernel = self.chosen[facts] = choose_kernel(self.kernel, query, mask)
        return kernel

    @property
    def gathers(self) -> bool:
        """True if keys are gathered (`gathered.py`), False if they are rotated around the ring (`ring.py`)."""
        return self.rotate_method != "alltoall" or (self.sparse is not None and self.sparse.sends_few)

    @property
    def rank(self) -> int:
        """This rank's index in the ring."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group; only valid in a ring of more than one rank."""
        assert self.group is not None, "a ring of one rank has no process group"
        return self.group

    def keys_of(self, owner: int) -> range:
        """Return the places of the keys that rank `owner` holds among those of the ring."""
        start = sum(self.kv_lengths[:owner])
        return range(start, start + self.kv_lengths[owner])

    @property
    def most_keys(self) -> int:
        """Number of keys of the ring; on a grid of the largest column, so that all of them slice heads alike."""
        return sum(self.kv_lengths) if self.row is None else max(sum(map(len, x)) for x in self.row.keys)

    def positions(self, places: range) -> list[range]:
        """Return the global positions of some of the ring's keys, which are not empty ranges."""
        found, at = [], 0
        for start, length in zip(
            self.kv_starts or (0,), self.kv_lengths if self.kv_starts else (sum(self.kv_lengths),)
        ):
            inside = range(max(places.start - at, 0), min(places.stop - at, length))
            if inside:
                found.append(range(start + inside.start, start + inside.stop))
            at += length
        return found

    def count_before(self, position: int) -> int:
        """Return the number of the ring's keys before a global position: the place of the first one after them."""
        return sum(len(range(x.start, min(x.stop, position))) for x in self.positions(range(sum(self.kv_lengths))))

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which tensors of `dtype` are summed."""
        return accumulation_dtype_of(dtype) if self.accumulate_fp32 else dtype


def part_of(part: PartialAttention, heads: Heads) -> PartialAttention:
    """Select out and lse of the query heads in `heads`."""
    return PartialAttention(part.out[:, :, heads.query], part.lse[:, :, heads.query])


def grad_of(grad: PartialAttentionGrad, heads: Heads) -> PartialAttentionGrad:
    """Select the gradients of out and lse of the query heads in `heads`."""
    return PartialAttentionGrad(grad.out[:, :, heads.query], None if grad.lse is None else grad.lse[:, :, heads.query])


Mask = Tensor | LocalMask | None  # of the local queries: over all keys, or over the local keys (key mask)
ChunkMask = Tensor | Tiles | None  # over one chunk of keys


def mask_of(mask: Mask, heads: Heads, keys: range) -> ChunkMask:
    """Slice a mask to some heads and some keys.

    Args:
        mask: [b or 1, hq or 1, sq or 1, sk_global], over all keys.
        keys: places of the keys among those of the ring.
    """
    if mask is None:
        return None
    if isinstance(mask, LocalMask):
        return mask.tiles(heads, keys)
    return mask[:, heads.query if mask.shape[1] > 1 else slice(None), :, keys.start : keys.stop]


class _ChunkMask(NamedTuple):
    """Mask and causal flag for the local queries over one chunk of keys."""

    mask: Tensor | None
    causal: bool


def attend_keys(q: Tensor, k: Tensor, v: Tensor, mask: ChunkMask, *, start: int, ring: Ring) -> PartialAttention | None:
    """Compute attention of the local queries over one chunk of keys; None if no query sees a key of it.

    Args:
        q: [b, sq_local, hq, d].
        k, v: [b, sk, hk, d].
        mask: [b or 1, hq or 1, sq_local or 1, sk], over the keys of the chunk; None: no mask.
        start: place of the first key of the chunk, see `Ring.keys_of`.
    """
    if isinstance(mask, Tiles):
        return (
            None
            if mask.is_empty
            else attend_tiles(partial(ring.kernel_for, q), q, k, v, mask, scale=ring.scale, kernel=ring.kernel)
        )
    chunk_mask = _chunk_mask(q, k, mask, start=start, ring=ring)
    if chunk_mask is None:
        return None
    kernel = ring.kernel_for(q, chunk_mask.mask)
    return attend(kernel, q, k, v, mask=chunk_mask.mask, causal=chunk_mask.causal, scale=ring.scale)


def key_grads(
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    mask: ChunkMask,
    *,
    start: int,
    ring: Ring,
) -> Grads | None:
    """Compute this rank's gradients through one chunk of keys; None if no query sees a key of it.

    Args:
        grad: gradients of out and lse.
        part: out and lse over all keys of the ring.
        q, k, v, mask, start: see `attend_keys`.
    """
    if isinstance(mask, Tiles):
        if mask.is_empty:
            return None
        kernel_for = partial(ring.kernel_for, q)
        return attend_tiles_backward(kernel_for, grad, q, k, v, part, mask, scale=ring.scale, kernel=ring.kernel)
    chunk_mask = _chunk_mask(q, k, mask, start=start, ring=ring)
    if chunk_mask is None:
        return None
    kernel = ring.kernel_for(q, chunk_mask.mask)
    return attend_backward(
        kernel,
        grad,
        q,
        k,
        v,
        part,
        mask=chunk_mask.mask,
        causal=chunk_mask.causal,
        scale=ring.scale,
        is_finite=not ring.causal and not ring.mask_kind,
    )


def key_tangents(
    inputs: Inputs, tangents: Inputs, lse: Tensor, mask: ChunkMask, *, start: int, ring: Ring
) -> PartialAttention | None:
    """Compute the contribution of one chunk of keys to the tangents of out and lse.

    Args:
        inputs: q, k and v, see `attend_keys`.
        tangents: tangents of `inputs`.
        lse: LSE over all keys of the ring.
        mask, start: see `attend_keys`.
    Returns: the sums of `TangentKernel.tangents`; None if no query sees a key of the chunk.
    """
    mask = mask.whole() if isinstance(mask, Tiles) else mask
    chunk_mask = _chunk_mask(inputs.query, inputs.key, mask, start=start, ring=ring)
    if chunk_mask is None:
        return None
    kernel = choose_tangent_kernel(ring.kernel)
    return attend_tangents(
        kernel, inputs, tangents, lse, mask=chunk_mask.mask, causal=chunk_mask.causal, scale=ring.scale
    )


class OnlineSoftmax:
    """Running merge of the local queries' attention over successive chunks of keys."""

    def __init__(self, q: Tensor, ring: Ring) -> None:
        self._q, self._dtype = q, ring.accumulation_dtype(q.dtype)
        self._total: PartialAttention | None = None
        self._is_single_part = True

    def add(self, part: PartialAttention | None) -> None:
        """Merge the attention over one more chunk.

        Args: part: out and lse over the chunk; its memory is reused. None: the queries see no key of the chunk.
        """
        if part is None:
            return
        if self._total is None:
            self._total = part
            return
        self._total = merge(accumulator(self._total, self._dtype) if self._is_single_part else self._total, part)
        self._is_single_part = False

    def merged(self) -> PartialAttention:
        """Return attention over all added chunks, out in q's dtype. If no chunk was added: out 0, lse -inf."""
        if self._total is None:  # every key lies after every query
            q = self._q
            return PartialAttention(
                torch.zeros_like(q), q.new_full(q.shape[:3], float("-inf"), dtype=accumulation_dtype_of(q.dtype))
            )
        return PartialAttention(self._total.out.to(self._q.dtype), self._total.lse)


def _chunk_mask(q: Tensor, key: Tensor, mask: Tensor | None, *, start: int, ring: Ring) -> _ChunkMask | None:
    """Return the mask and causal flag for a chunk of keys that begins at `start`; None if causality hides all of it."""
    sq, sk = q.shape[1], key.shape[1]
    positions = ring.positions(range(start, start + sk)) if ring.causal else []
    if not positions or positions[-1].stop <= ring.q_start + 1:
        return _ChunkMask(mask, causal=False)
    if positions[0].start >= ring.q_start + sq:
        return None
    if positions == [range(ring.q_start, ring.q_start + sq)] and mask is None:
        return _ChunkMask(None, causal=True)
    queries = torch.arange(ring.q_start, ring.q_start + sq, device=q.device)
    places = torch.cat([torch.arange(x.start, x.stop, device=q.device) for x in positions])
    visible = (places <= queries.unsqueeze(1))[None, None]
    if mask is None:
        return _ChunkMask(visible, causal=False)
    if mask.dtype == torch.bool:
        return _ChunkMask(mask & visible, causal=False)
    return _ChunkMask(mask.masked_fill(~visible, float("-inf")), causal=False)
