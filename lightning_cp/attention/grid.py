"""Attention on a grid of ranks: queries are gathered along the row, keys and values along the column.

Rank (i, j) of R rows and C columns holds chunk i C + j of the tokens. It computes attention of the queries of row i
over the keys of column j: `ring.py` with all-gathered keys, where the ring is the column. Then each rank of the row
gets its queries' C partial results, and merges them. A rank receives C - 1 + R - 1 chunks instead of R C - 1.

Two exchanges within a row are each other's adjoint: `_Gathered` gives every rank the tensors of all queries of the row,
and `_ToOwners` gives each rank all results for its own queries, to be merged or summed.
Source: NVIDIA, TensorRT-LLM's Attention2D (inference only).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.attention.heads import tokens_first
from lightning_cp.attention.keys import OnlineSoftmax, Ring, Row
from lightning_cp.attention.ring import (
    Slices,
    join_heads,
    ring_backward,
    ring_forward,
    ring_keys,
    ring_parts,
    ring_tangents,
)
from lightning_cp.attention.ulysses import all_to_all
from lightning_cp.comm.packet import BUFFERS, Layout, Piece, packet_bytes, unpack_tensors
from lightning_cp.comm.transfer import exchange_flat, gather_flat
from lightning_cp.kernels import Grads, Inputs, PartialAttention, PartialAttentionGrad


def grid_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring) -> PartialAttention:
    """Compute attention of the local queries over all keys of the grid; without `ring.row`, `ring_forward`.

    Args:
        q: [b, sq_local, hq, d].
        k, v: [b, sk_local, hk, d].
        mask: [b or 1, hq or 1, 1, sk_local] (key mask) or [b or 1, hq or 1, sq_local or 1, sk_grid] (query mask).
    Returns: out [b, sq_local, hq, d] in q's dtype, lse [b, sq_local, hq].
    Ranks: all of the row and of the column. Each sends q, out and lse C - 1 times, and what `gathered_keys` sends. Out
        and lse of a slice of heads are sent while the next slice is computed. A query mask is sent to the row: to each
        rank the part for its keys.
    """
    if (row := ring.row) is None:
        return ring_forward(q, k, v, mask, ring=ring)
    mask = _mask_of_row(mask, row, ring)
    gathered = _Gathered([q], row)
    slices = _begun(gathered.tensors[0], k, v, mask, ring)
    (row_q,) = gathered.wait()
    returned = [_ToOwners(part, row) for part in ring_parts(row_q, slices, ring=ring)]
    gathered.free()
    return join_heads([_merged(x.wait(), q, ring) for x in returned])


def _merged(parts: Sequence[Tensor], q: Tensor, ring: Ring) -> PartialAttention:
    """Merge partial results. Args: parts: out [parts, b, s, h, d] and lse [parts, b, s, h]. q: its dtype is used."""
    softmax = OnlineSoftmax(q, ring)
    for out, lse in zip(*parts, strict=True):
        softmax.add(PartialAttention(out, lse))
    return softmax.merged()


def grid_backward(
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    mask: Tensor | None,
    *,
    ring: Ring,
) -> Grads:
    """Compute the gradients of `grid_forward`; queries, keys and values are gathered again.

    Args, Returns: see `ring_backward`.
    Ranks: all of the row and of the column. Each sends q, the gradients of out (and of lse) and two numbers for each
        query and head C - 1 times, dQ C - 1 times in q's dtype, and what `ring_backward` sends.
    """
    if (row := ring.row) is None:
        return ring_backward(grad, q, k, v, part, mask, ring=ring)
    grad_out = grad.out.to(q.dtype)
    of_lse = [] if grad.lse is None else [grad.lse]
    product = (part.out.to(part.lse.dtype) * grad_out).sum(-1)
    gathered = _Gathered([q, grad_out, product, part.lse, *of_lse], row)
    mask = _mask_of_row(mask, row, ring)
    slices = _begun(gathered.tensors[0], k, v, mask, ring, by_chunk=True)
    row_q, row_grad, product, lse, *of_lse = gathered.wait()
    row_part = PartialAttention(_with_product(product, row_grad), lse)
    row_grads = PartialAttentionGrad(row_grad, of_lse[0] if of_lse else None)
    dq, dk, dv = ring_backward(row_grads, row_q, k, v, row_part, mask, ring=ring, slices=slices)
    del row_part
    gathered.free()
    (grads,) = _ToOwners([dq], row).wait()
    return Grads(grads.sum(0, dtype=ring.accumulation_dtype(q.dtype)).to(q.dtype), dk, dv)


def grid_tangents(
    inputs: Inputs, tangents: Inputs, part: PartialAttention, mask: Tensor | None, *, ring: Ring
) -> PartialAttention:
    """Compute the tangents of `grid_forward`'s out and lse.

    Args, Returns: see `ring_tangents`.
    Ranks: all of the row and of the column. Each sends q, its tangent, lse, and the tangents of out and of lse C - 1
        times, and what `ring_tangents` sends.
    """
    if (row := ring.row) is None:
        return ring_tangents(inputs, tangents, part, mask, ring=ring)
    gathered = _Gathered([inputs.query, tangents.query, part.lse], row)
    mask = _mask_of_row(mask, row, ring)
    q, dq, lse = gathered.wait()
    nothing = PartialAttention(torch.zeros_like(q), lse)  # what it subtracts is subtracted from the sum below
    found = ring_tangents(Inputs(q, *inputs[1:]), Inputs(dq, *tangents[1:]), nothing, mask, ring=ring)
    gathered.free()
    outs, lses = _ToOwners(found, row).wait()
    total = lses.sum(0)
    out = outs.sum(0, dtype=total.dtype) - total.unsqueeze(-1) * part.out
    return PartialAttention(out.to(inputs.query.dtype), total)


class _Gathered:
    """All-gather of tensors of the local queries, [b, sq_local, h, ...] -> [b, sq_row, h, ...], in one collective.

    Tokens are sent as packets [s, b, bytes], so that those of all ranks lie in place. Adjoint: `_ToOwners`, summed.

    Attributes: tensors: the results, valid between `wait` and `free`.
    """

    def __init__(self, tensors: Sequence[Tensor], row: Row) -> None:
        layout, total = _layout(tensors), sum(row.q_lengths)
        b, s = tensors[0].shape[:2]
        item = b * packet_bytes(layout)
        sent, received = (BUFFERS.take(n * item, tensors[0]) for n in (s, total))
        _write(tensors, sent)
        self._pending = gather_flat(sent, received, [n * item for n in row.q_lengths], group=row.group)
        self._buffers = sent, received
        packets = received.view(total, b, packet_bytes(layout))
        self.tensors = [tokens_first(x) for x in unpack_tensors(packets, layout)]

    def wait(self) -> list[Tensor]:
        self._pending.wait()
        return self.tensors

    def free(self) -> None:
        BUFFERS.give(*self._buffers)


class _ToOwners:
    """Exchange of results, [b, sq_row, h, ...] -> [ranks of the row, b, sq_local, h, ...], in one collective.

    Each rank gets all ranks' results for its queries, and sends theirs. Adjoint: `_Gathered`.
    """

    def __init__(self, tensors: Sequence[Tensor], row: Row) -> None:
        layout, ranks, s = _layout(tensors), len(row.q_lengths), row.q_lengths[dist.get_rank(row.group)]
        b, total = tensors[0].shape[:2]
        item = b * packet_bytes(layout)
        self._sent = BUFFERS.take(total * item, tensors[0])
        received = tensors[0].new_empty(ranks, s, b, packet_bytes(layout), dtype=torch.uint8)  # results are views of it
        _write(tensors, self._sent)
        sizes = None if row.q_lengths.count(s) == ranks else ([n * item for n in row.q_lengths], [s * item] * ranks)
        self._pending = exchange_flat(self._sent, received.view(-1), sizes, group=row.group)
        self._tensors = [x.transpose(1, 2) for x in unpack_tensors(received, layout)]

    def wait(self) -> list[Tensor]:
        self._pending.wait()
        BUFFERS.give(self._sent)
        return self._tensors


def _layout(tensors: Sequence[Tensor]) -> Layout:
    """Return the layout of the packet of one token. Args: tensors: [b, s, h, ...]."""
    return [Piece(tuple(x.shape[2:]), x.dtype) for x in tensors]


def _write(tensors: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy tensors [b, s, h, ...] into packets of tokens."""
    layout, (b, s) = _layout(tensors), tensors[0].shape[:2]
    views = unpack_tensors(buffer.view(s, b, packet_bytes(layout)), layout)
    for view, x in zip(views, tensors, strict=True):
        view.copy_(tokens_first(x))


def _begun(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring, by_chunk: bool = False) -> Slices:
    """Return `ring_keys`, with its first transfer started, to overlap with that of the queries."""
    slices = ring_keys(q, k, v, mask, ring=ring, by_chunk=by_chunk)
    return chain([next(slices)], slices)


def _with_product(product: Tensor, grad: Tensor) -> Tensor:
    """Return a tensor x in grad's shape and dtype with sum(x grad) = product, [b, s, h].

    Kernels read out only to compute sum(out grad), so this one number is sent in place of out. Without rounding to a
    narrower dtype, x is a multiple of grad. Otherwise two entries of x hold it, those where grad is largest: what one
    of them loses by rounding is in the other one.
    """
    if grad.dtype == product.dtype:
        largest = grad.abs().amax(-1, keepdim=True)
        largest = largest.masked_fill_(largest == 0, 1)
        unit = grad / largest  # its square cannot underflow
        return unit.mul_(product.unsqueeze(-1) / (largest * unit.square().sum(-1, keepdim=True).clamp_(min=1)))
    found, wide = torch.zeros_like(grad), grad.to(product.dtype)
    rest, sizes = product.unsqueeze(-1), wide.abs()
    for _ in range(2):
        largest = sizes.argmax(-1, keepdim=True)
        entry = wide.gather(-1, largest)
        x = (rest / entry.masked_fill(entry == 0, float("inf"))).to(grad.dtype)
        found.scatter_add_(-1, largest, x)
        rest = rest - x * entry
        sizes.scatter_(-1, largest, -1)
    return found


def _mask_of_row(mask: Tensor | None, row: Row, ring: Ring) -> Tensor | None:
    """Return the mask of the row's queries over the keys of this rank's column; a key mask as it is.

    Ranks: all of the row, for a query mask.
    """
    if mask is None or ring.mask_kind != "query_mask":
        return mask
    rank = dist.get_rank(row.group)
    parts = [torch.cat([mask[..., x.start : x.stop] for x in ranges], -1) for ranges in row.keys]
    received = [mask.new_empty(*mask.shape[:2], n, parts[rank].shape[-1]) for n in row.mask_query_sizes]
    all_to_all([[x] for x in parts], [[x] for x in received], group=row.group)
    return torch.cat([x.expand(-1, -1, n, -1) for x, n in zip(received, row.q_lengths, strict=True)], 2)
