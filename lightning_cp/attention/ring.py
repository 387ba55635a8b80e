"""Attention over the keys of all ring ranks: on one rank, all-gathered, or rotated around the ring chunk by chunk."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_cp.attention.gathered import gathered_backward, gathered_forward, gathered_keys
from lightning_cp.attention.heads import Heads, slice_heads
from lightning_cp.attention.keys import (
    ChunkMask,
    Mask,
    OnlineSoftmax,
    Ring,
    attend_keys,
    grad_of,
    key_grads,
    mask_of,
    part_of,
)
from lightning_cp.comm.packet import Layout, Piece
from lightning_cp.comm.ring_exchange import LayoutOf, RingGradReducer, rotate
from lightning_cp.kernels import Grads, PartialAttention, PartialAttentionGrad


def ring_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring) -> PartialAttention:
    """Compute attention of the local queries over all keys of the ring, by `ring.rotate_method`.

    Args:
        q: [b, sq_local, hq, d].
        k, v: [b, sk_local, hk, d].
        mask: [b or 1, hq or 1, 1, sk_local] (key mask) or [b or 1, hq or 1, sq_local or 1, sk_global] (query mask).
    Returns: out [b, sq_local, hq, d] in q's dtype, lse [b, sq_local, hq].
    Ranks: all of `ring.group`. With "alltoall" each sends (n - 1) packets of K, V and a key mask, and holds two
        remote chunks; with "allgather" see `gathered_forward`.
    """
    if ring.group is not None and ring.gathers:
        return gathered_forward(q, k, v, mask, ring=ring)
    of_queries = _query_mask(mask, ring)
    if ring.group is None:
        part = attend_keys(q, k, v, _for_keys(of_queries, q, k, range(k.shape[1])), start=0, ring=ring)
        return OnlineSoftmax(q, ring).merged() if part is None else part
    softmax = OnlineSoftmax(q, ring)
    for owner, chunk in _chunks(ring, k, v, mask):  # keep no other reference to `chunk`: its memory is reused
        softmax.add(_attend_chunk(q, chunk, of_queries, owner=owner, ring=ring))
    return softmax.merged()


def ring_backward(
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    mask: Tensor | None,
    *,
    ring: Ring,
) -> Grads:
    """Compute the gradients of `ring_forward` from its inputs and result; K and V are exchanged again.

    Args:
        grad: gradients of out and lse.
        part: out and lse that `ring_forward` returned.
        q, k, v, mask: see `ring_forward`.
    Returns: dq, dk, dv of the local q, k, v, in their dtypes.
    Ranks: all of `ring.group`. With "alltoall" each sends (n - 1) packets of K, V and mask, and (n - 1) of dK and dV
        (in float32 if `accumulate_fp32`); with "allgather" see `gathered_backward`.
    """
    if ring.group is None:
        of_keys = _for_keys(_query_mask(mask, ring), q, k, range(k.shape[1]))
        grads = key_grads(grad, q, k, v, part, of_keys, start=0, ring=ring)
        return Grads(q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)) if grads is None else grads
    backward = gathered_backward if ring.gathers else _rotated_backward
    return backward(grad, q, k, v, part, mask, ring=ring)


def _rotated_backward(
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    mask: Tensor | None,
    *,
    ring: Ring,
) -> Grads:
    """Compute `ring_backward` with K and V rotated around the ring, followed by their gradients."""
    dq = q.new_zeros(q.shape, dtype=ring.accumulation_dtype(q.dtype))
    dk, dv = (x.new_empty(x.shape, dtype=ring.accumulation_dtype(x.dtype)) for x in (k, v))
    of_queries = _query_mask(mask, ring)

    def add_own(heads: Heads, key: Tensor, value: Tensor) -> None:
        """Compute the gradients of some heads through the local keys; initializes their dK and dV."""
        keys = ring.keys_of(ring.rank)
        chunk_mask = mask_of(of_queries, heads, range(len(keys)) if ring.mask_kind == "key_mask" else keys)
        inputs = (grad_of(grad, heads), *heads.of(q, key, value), part_of(part, heads))
        grads = key_grads(*inputs, chunk_mask, start=keys.start, ring=ring)
        if grads is None:
            dk[:, :, heads.key], dv[:, :, heads.key] = 0, 0
            return
        dq[:, :, heads.query].add_(grads.query)
        dk[:, :, heads.key], dv[:, :, heads.key] = grads.key, grads.value

    first, *others = slice_heads(q.shape[2], k.shape[2], 2)
    reducer = RingGradReducer(_layouts(_by_head([dk, dv]), ring), group=ring.process_group)
    for owner, chunk in _chunks(ring, k, v, mask):
        if owner == ring.rank:
            add_own(first, *chunk[:2])
            continue
        grads = _chunk_grads(grad, q, chunk, part, of_queries, owner=owner, ring=ring)
        if grads is None:
            reducer.add(owner, _by_head([torch.zeros_like(x) for x in chunk[:2]]))
            continue
        dq.add_(grads.query)
        reducer.add(owner, _by_head([grads.key, grads.value]))
        del grads  # free before the next chunk's gradients are allocated
    for heads in others:  # local keys: overlap with the last dK/dV receive
        add_own(heads, k, v)
    reducer.finish(_by_head([dk, dv]))
    return Grads(*(total.to(q.dtype) for total in (dq, dk, dv)))


def ring_keys(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring
) -> Iterator[tuple[Heads, int, Tensor, Tensor, ChunkMask]]:
    """Yield all keys of the ring, by `ring.rotate_method`: heads, global position of the first key, K, V and mask.

    Args:
        q: only its shape is used.
        k, v: [b, sk_local, hk, any].
    Ranks: all of `ring.group`.
    """
    if ring.group is not None and ring.rotate_method == "allgather":
        yield from gathered_keys(q, k, v, mask, ring=ring)
        return
    heads, of_queries = _all_heads(q, k), _query_mask(mask, ring)
    if ring.group is None:
        yield heads, 0, k, v, mask_of(of_queries, heads, range(k.shape[1]))
        return
    for owner, chunk in _chunks(ring, k, v, mask):
        keys = ring.keys_of(owner)
        yield heads, keys.start, chunk[0], chunk[1], _mask_of(q, chunk, of_queries, keys)


def _attend_chunk(q: Tensor, chunk: list[Tensor], mask: Mask, *, owner: int, ring: Ring) -> PartialAttention | None:
    """Compute attention of the local queries over `owner`'s chunk; None if causality hides the whole chunk."""
    key, value, keys = chunk[0], chunk[1], ring.keys_of(owner)
    return attend_keys(q, key, value, _mask_of(q, chunk, mask, keys), start=keys.start, ring=ring)


def _chunk_grads(
    grad: PartialAttentionGrad,
    q: Tensor,
    chunk: list[Tensor],
    part: PartialAttention,
    mask: Mask,
    *,
    owner: int,
    ring: Ring,
) -> Grads | None:
    """Compute this rank's gradients through `owner`'s chunk; None if causality hides the whole chunk."""
    key, value, keys = chunk[0], chunk[1], ring.keys_of(owner)
    return key_grads(grad, q, key, value, part, _mask_of(q, chunk, mask, keys), start=keys.start, ring=ring)


def _mask_of(q: Tensor, chunk: list[Tensor], mask: Mask, keys: range) -> ChunkMask:
    """Return the mask of a chunk's keys: received with the chunk (key mask), or a slice of the local query mask."""
    return chunk[2] if len(chunk) > 2 else _for_keys(mask, q, chunk[0], keys)


def _query_mask(mask: Tensor | None, ring: Ring) -> Mask:
    """Return the mask of the local queries: a sparse mask, or the tensor."""
    return mask if ring.sparse is None else ring.sparse


def _for_keys(mask: Mask, q: Tensor, k: Tensor, keys: range) -> ChunkMask:
    """Slice the mask of the local queries to some keys, for all heads."""
    return None if mask is None else mask_of(mask, _all_heads(q, k), keys)


def _all_heads(q: Tensor, k: Tensor) -> Heads:
    return slice_heads(q.shape[2], k.shape[2], 1)[0]


def _chunks(ring: Ring, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[tuple[int, list[Tensor]]]:
    local = _by_head([k, v]) if mask is None or ring.mask_kind != "key_mask" else [*_by_head([k, v]), mask]
    for owner, chunk in rotate(local, _layouts(local, ring), group=ring.process_group):
        chunk[:2] = _by_head(chunk[:2])
        yield owner, chunk


def _by_head(tensors: list[Tensor]) -> list[Tensor]:
    """Transpose [b, s, h, d] to [b, h, s, d] or back. Chunks are sent as [b, h, s, d]: kernels are faster on it."""
    return [x.transpose(1, 2) for x in tensors]


def _layouts(local: list[Tensor], ring: Ring) -> LayoutOf:
    """Return a function that gives the layout of an owner's chunk; computed once for owners with equal lengths."""
    layout = functools.cache(functools.partial(_layout, local))
    return lambda owner: layout(ring.kv_lengths[owner])


def _layout(local: list[Tensor], length: int) -> Layout:
    """Return the layout of a chunk of `length` keys: K and V [b, hk, length, d], mask [.., .., 1, length]."""
    pieces = []
    for index, x in enumerate(local):
        shape = list(x.shape)
        shape[2 if index < 2 else 3] = length
        pieces.append(Piece(tuple(shape), x.dtype))
    return pieces
