"""Attention over the keys of all ring ranks: one walk over them, for the output, its gradients and its tangents.

The keys are on one rank, all-gathered (`gathered.py`), or rotated around the ring chunk by chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_cp.attention.gathered import GatheredGradReducer, KeyPiece, gathered_keys
from lightning_cp.attention.heads import Heads, slice_heads
from lightning_cp.attention.keys import (
    ChunkMask,
    OnlineSoftmax,
    Ring,
    attend_keys,
    grad_of,
    key_grads,
    key_tangents,
    mask_of,
    part_of,
)
from lightning_cp.attention.sparse.needed import NeededGradReducer
from lightning_cp.comm.packet import Layout, Piece
from lightning_cp.comm.ring_exchange import LayoutOf, RingGradReducer, rotate
from lightning_cp.kernels import Grads, Inputs, PartialAttention, PartialAttentionGrad

Slices: TypeAlias = Iterator[tuple[Heads, Iterator[KeyPiece]]]  # of heads, each with all keys of the ring


def ring_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring) -> PartialAttention:
    """Compute attention of the local queries over all keys of the ring, by `ring.rotate_method`.

    Args:
        q: [b, sq_local, hq, d].
        k, v: [b, sk_local, hk, d].
        mask: [b or 1, hq or 1, 1, sk_local] (key mask) or [b or 1, hq or 1, sq_local or 1, sk_ring] (query mask).
    Returns: out [b, sq_local, hq, d] in q's dtype, lse [b, sq_local, hq].
    Ranks: all of `ring.group`, see `ring_keys`.
    """
    if ring.group is None:
        whole = attend_keys(q, k, v, _mask_on_one_rank(q, k, mask, ring), start=0, ring=ring)
        return OnlineSoftmax(q, ring).merged() if whole is None else whole
    return join_heads(list(ring_parts(q, ring_keys(q, k, v, mask, ring=ring), ring=ring)))


def ring_parts(q: Tensor, slices: Slices, *, ring: Ring) -> Iterator[PartialAttention]:
    """Yield attention of each slice of heads. Args: slices: the result of `ring_keys`."""
    for heads, pieces in slices:
        own_q = q if heads.num_queries == q.shape[2] else q[:, :, heads.query]
        softmax = OnlineSoftmax(own_q, ring)
        for keys in pieces:
            softmax.add(attend_keys(own_q, keys.key, keys.value, keys.mask, start=keys.start, ring=ring))
            del keys  # its memory is reused
        yield softmax.merged()


def join_heads(parts: Sequence[PartialAttention]) -> PartialAttention:
    """Concatenate the attention of slices of heads."""
    if len(parts) == 1:
        return parts[0]
    return PartialAttention(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


def ring_backward(
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    mask: Tensor | None,
    *,
    ring: Ring,
    slices: Slices | None = None,
) -> Grads:
    """Compute the gradients of `ring_forward` from its inputs and result; K and V are exchanged again.

    Args:
        grad: gradients of out and lse.
        part: out and lse that `ring_forward` returned.
        q, k, v, mask: see `ring_forward`.
        slices: the result of `ring_keys` with `by_chunk`, if it was called before.
    Returns: dq, dk, dv of the local q, k, v, in their dtypes.
    Ranks: all of `ring.group`, see `ring_keys`. Each also sends dK and dV of the other ranks' keys (in float32 if
        `accumulate_fp32`): n - 1 packets with "alltoall".
    """
    if ring.group is None:
        grads = key_grads(grad, q, k, v, part, _mask_on_one_rank(q, k, mask, ring), start=0, ring=ring)
        return Grads(*(x.new_zeros(x.shape) for x in (q, k, v))) if grads is None else grads
    dq, reducer = _QueryGrad(q, ring), _reducer(k, ring)

    def piece_grads(heads: Heads, pieces: Iterator[KeyPiece]) -> list[tuple[int, Grads]]:
        own_grad, own_q, own_part = grad, q, part
        if heads.num_queries < q.shape[2]:
            own_grad, own_q, own_part = grad_of(grad, heads), q[:, :, heads.query], part_of(part, heads)
        found = []
        for keys in pieces:
            grads = key_grads(own_grad, own_q, keys.key, keys.value, own_part, keys.mask, start=keys.start, ring=ring)
            if grads is not None:
                dq.add(heads, grads.query)
                found.append((keys.start, grads))
            del keys, grads
        return found

    for heads, pieces in slices or ring_keys(q, k, v, mask, ring=ring, by_chunk=True):
        reducer.send(heads, piece_grads(heads, pieces))
    dk, dv = reducer.finish()
    return Grads(dq.total(), dk, dv)


def ring_tangents(
    inputs: Inputs, tangents: Inputs, part: PartialAttention, mask: Tensor | None, *, ring: Ring
) -> PartialAttention:
    """Compute the tangents of `ring_forward`'s out and lse.

    Args:
        inputs: q, k, v, see `ring_forward`.
        tangents: tangents of `inputs`, in their shapes and dtypes.
        part: the result of `ring_forward`.
        mask: see `ring_forward`; it has no tangent.
    Returns: tangents of out [b, sq_local, hq, d] in q's dtype and of lse [b, sq_local, hq]; 0 for queries without keys.
    Ranks: all of `ring.group`. Each sends K, V and their tangents n - 1 times, and a key mask.
    """
    q, d = inputs.query, inputs.query.shape[3]
    out = q.new_zeros(q.shape, dtype=ring.accumulation_dtype(q.dtype))
    lse = torch.zeros_like(part.lse)
    keys, values = (torch.cat(pair, -1) for pair in zip(inputs[1:], tangents[1:], strict=True))
    for heads, pieces in ring_keys(q, keys, values, mask, ring=ring):
        for start, key, value, chunk_mask in pieces:
            primals = Inputs(q[:, :, heads.query], key[..., :d], value[..., :d])
            chunk_tangents = Inputs(tangents.query[:, :, heads.query], key[..., d:], value[..., d:])
            contribution = key_tangents(
                primals, chunk_tangents, part.lse[:, :, heads.query], chunk_mask, start=start, ring=ring
            )
            if contribution is not None:
                out[:, :, heads.query] += contribution.out
                lse[:, :, heads.query] += contribution.lse
    out -= lse.unsqueeze(-1) * part.out
    return PartialAttention(out.to(q.dtype), lse)


def ring_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring, by_chunk: bool = False) -> Slices:
    """Yield slices of heads, each with all keys of the ring in pieces, which are valid until the next one is requested.

    Args:
        q: only its shape is used.
        k, v: [b, sk_local, hk, any], with the same last dim.
        by_chunk: for gradients. Chunks that rotate come one by one, and this rank's in two halves of heads, first and
            last: the last one overlaps with the last receive of dK and dV.
    Ranks: all of `ring.group`. With "alltoall" each sends n - 1 packets of K, V and a key mask, and holds two remote
        chunks; with "allgather" see `gathered_keys`.
    """
    if ring.group is not None and ring.gathers:
        yield from gathered_keys(q, k, v, mask, ring=ring)
        return
    (all_heads,), of_queries = slice_heads(q.shape[2], k.shape[2], 1), mask if ring.sparse is None else ring.sparse
    if ring.group is None:
        yield all_heads, iter([KeyPiece(0, k, v, _mask_on_one_rank(q, k, mask, ring))])
        return

    def piece(owner: int, chunk: list[Tensor], heads: Heads = all_heads) -> KeyPiece:
        keys = ring.keys_of(owner)
        places = range(len(keys)) if len(chunk) > 2 else keys
        chunk_mask = mask_of(chunk[2] if len(chunk) > 2 else of_queries, heads, places)
        key, value = chunk[:2] if heads is all_heads else (x[:, :, heads.key] for x in chunk[:2])
        return KeyPiece(keys.start, key, value, chunk_mask)

    local = [k, v, *([] if mask is None or ring.mask_kind != "key_mask" else [mask])]
    chunks = _rotated(local, ring)
    if not by_chunk:
        yield all_heads, (piece(owner, chunk) for owner, chunk in chunks)
        return
    first, *others = slice_heads(q.shape[2], k.shape[2], 2)
    for owner, chunk in chunks:
        heads = first if owner == ring.rank else all_heads
        yield heads, iter([piece(owner, chunk, heads)])
    for heads in others:
        yield heads, iter([piece(ring.rank, local, heads)])


def _mask_on_one_rank(q: Tensor, k: Tensor, mask: Tensor | None, ring: Ring) -> ChunkMask:
    if ring.sparse is None:
        return mask
    return mask_of(ring.sparse, slice_heads(q.shape[2], k.shape[2], 1)[0], range(k.shape[1]))


class _QueryGrad:
    """Sum of dq over pieces of the keys, without a copy if there is only one."""

    def __init__(self, q: Tensor, ring: Ring) -> None:
        self._q, self._dtype = q, ring.accumulation_dtype(q.dtype)
        self._total: Tensor | None = None

    def add(self, heads: Heads, grad: Tensor) -> None:
        if self._total is None and grad.shape == self._q.shape:
            self._total = grad
            return
        total = self._q.new_zeros(self._q.shape, dtype=self._dtype) if self._total is None else self._total
        self._total = total.to(self._dtype)
        self._total[:, :, heads.query].add_(grad)

    def total(self) -> Tensor:
        return torch.zeros_like(self._q) if self._total is None else self._total.to(self._q.dtype)


def _reducer(k: Tensor, ring: Ring) -> GatheredGradReducer | NeededGradReducer | _RotatedGradReducer:
    """Return what sums every rank's dK and dV at the keys' owner."""
    if not ring.gathers:
        return _RotatedGradReducer(k, ring)
    if ring.sparse is None:
        return GatheredGradReducer(k, ring)
    return NeededGradReducer(k, ring.accumulation_dtype(k.dtype), ring.sparse.needs, group=ring.process_group)


class _RotatedGradReducer:
    """dK and dV that follow their chunks around the ring. Slices come in the order of `ring_keys(by_chunk=True)`."""

    def __init__(self, k: Tensor, ring: Ring) -> None:
        self._k, self._ring, self._step = k, ring, 0
        self._totals = [k.new_empty(k.shape, dtype=ring.accumulation_dtype(k.dtype)) for _ in range(2)]
        self._others = RingGradReducer(_layouts(_by_head(self._totals), ring), group=ring.process_group)

    def send(self, heads: Heads, piece_grads: list[tuple[int, Grads]]) -> None:
        owner = (self._ring.rank - self._step) % len(self._ring.kv_lengths)
        self._step += 1
        grads = [x for _, grads in piece_grads for x in grads[1:]]
        if owner == self._ring.rank:
            for index, total in enumerate(self._totals):
                total[:, :, heads.key] = grads[index] if grads else 0
            return
        (b, _, *rest), length = self._k.shape, self._ring.kv_lengths[owner]
        self._others.add(owner, _by_head(grads or [self._k.new_zeros(b, length, *rest) for _ in range(2)]))

    def finish(self) -> list[Tensor]:
        self._others.finish(_by_head(self._totals))
        return [total.to(self._k.dtype) for total in self._totals]


def _rotated(local: list[Tensor], ring: Ring) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield each rank's K, V and key mask, this rank's first. Keep no other reference: their memory is reused."""
    local = [*_by_head(local[:2]), *local[2:]]
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
