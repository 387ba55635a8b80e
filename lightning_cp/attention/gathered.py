"""Attention over all-gathered keys: K and V of all ranks, one slice of heads at a time.

The transfer of the next slice overlaps with the attention of the current one. All keys of a head are available at once,
so partial results are merged only in the first slice and at causal boundaries. Memory is bounded: two receive buffers
of one slice each, used in turn, and one buffer in which a slice is concatenated.
The transfer of the first slice overlaps with attention over the local keys; its chunks are used rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.attention.heads import Heads, slice_heads
from lightning_cp.attention.keys import OnlineSoftmax, Ring, attend_keys, grad_of, key_grads, mask_of, part_of
from lightning_cp.comm.buffers import BUFFERS
from lightning_cp.comm.packet import Layout, Piece, pack, packet_bytes, unpack
from lightning_cp.comm.packets import Packets, all_gather_tensors, exchange_packets
from lightning_cp.kernels import Grads, PartialAttention, PartialAttentionGrad

# Bytes of K and V gathered at a time, at least one head: large enough to saturate the bandwidth and the kernel.
SLICE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}


class _KeyPiece(NamedTuple):
    """Keys of one kernel call. `start`: global position of the first key; K and V: [b, sk, heads, d]."""

    start: int
    key: Tensor
    value: Tensor

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.key.shape[1])


def gathered_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring) -> PartialAttention:
    """Compute attention of the local queries over all keys of the ring.

    Args, Returns: see `ring_forward`.
    Ranks: all of `ring.group`. Each sends its K and V, and a key mask, n - 1 times.
    """
    mask, parts = _mask_of_all(mask, ring), []
    for heads, pieces in _gathered(q, k, v, ring):
        own_q = q[:, :, heads.query]
        softmax = OnlineSoftmax(own_q, ring)
        for keys in pieces:
            piece_mask = mask_of(mask, heads, keys.positions)
            softmax.add(attend_keys(own_q, keys.key, keys.value, piece_mask, start=keys.start, ring=ring))
        parts.append(softmax.merged())
    if len(parts) == 1:
        return parts[0]
    return PartialAttention(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


def gathered_backward(
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    mask: Tensor | None,
    *,
    ring: Ring,
) -> Grads:
    """Compute the gradients of `gathered_forward` from its inputs and result; K and V are gathered again.

    Args, Returns: see `ring_backward`.
    Ranks: all of `ring.group`. Each sends its K, V and mask n - 1 times, and dK and dV of every other rank's keys (in
        float32 if `accumulate_fp32`).
    """
    mask, reducer, queries = _mask_of_all(mask, ring), _GatheredGradReducer(k, ring), []
    for heads, pieces in _gathered(q, k, v, ring):
        own_grad, own_q, own_part = grad_of(grad, heads), q[:, :, heads.query], part_of(part, heads)
        total: Tensor | None = None
        piece_grads: list[tuple[int, Grads]] = []
        for keys in pieces:
            piece_mask = mask_of(mask, heads, keys.positions)
            grads = key_grads(own_grad, own_q, keys.key, keys.value, own_part, piece_mask, start=keys.start, ring=ring)
            if grads is None:
                continue
            piece_grads.append((keys.start, grads))
            total = grads.query if total is None else total.to(ring.accumulation_dtype(q.dtype)).add_(grads.query)
        reducer.send(heads, piece_grads)
        queries.append(torch.zeros_like(own_q) if total is None else total)
    dk, dv = reducer.finish()
    dq = queries[0] if len(queries) == 1 else torch.cat(queries, 2)
    return Grads(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


def gathered_keys(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring
) -> Iterator[tuple[Heads, int, Tensor, Tensor, Tensor | None]]:
    """Yield all keys of the ring in pieces: heads, global position of the first key, K, V and mask.

    Args:
        q: only its shape and dtype are used.
        k, v: [b, sk_local, hk, any], with the same last dim.
    Ranks: all of `ring.group`.
    """
    mask = _mask_of_all(mask, ring)
    for heads, pieces in _gathered(q, k, v, ring):
        for keys in pieces:
            yield heads, keys.start, keys.key, keys.value, mask_of(mask, heads, keys.positions)


def _gathered(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[Heads, Iterator[_KeyPiece]]]:
    """Yield K and V of all ranks, one slice of heads at a time; the next slice is received while this one is used.

    The first slice is yielded rank by rank, local keys first, so that its transfer overlaps with attention. Later
    slices are yielded with all keys at once.
    """
    slices = _slices(q, k, sum(ring.kv_lengths))
    sizes = [[packet_bytes(_layout(k, heads, n)) for n in ring.kv_lengths] for heads in slices]
    recv_bytes = max(sum(_remote_sizes(slice_sizes, ring)) for slice_sizes in sizes)
    recv_buffers = [BUFFERS.take(recv_bytes, k) for _ in slices[:2]]
    concatenated = BUFFERS.take(max(map(sum, sizes)) if len(slices) > 1 else 0, k)

    def start(index: int) -> Packets:
        local = [x[:, :, slices[index].key].transpose(1, 2) for x in (k, v)]
        packet = pack(local, out=BUFFERS.take(sizes[index][ring.rank], k))
        others = _remote_sizes(sizes[index], ring)
        incoming = torch.split(recv_buffers[index % 2][: sum(others)], others)
        return exchange_packets([packet] * len(incoming), incoming, group=ring.process_group)

    next_packets = start(0)
    for index, heads in enumerate(slices):
        packets = next_packets
        if index + 1 < len(slices):
            next_packets = start(index + 1)
        layouts = [_layout(k, heads, n) for n in ring.kv_lengths]
        if index == 0:
            yield heads, _by_rank(packets, layouts, ring)
        else:
            yield heads, _all_at_once(packets, layouts, concatenated, q, ring)
        BUFFERS.give(packets.by_rank[ring.rank])
    BUFFERS.give(concatenated, *recv_buffers)


def _by_rank(packets: Packets, layouts: list[Layout], ring: Ring) -> Iterator[_KeyPiece]:
    size = len(layouts)
    for step in range(size):
        owner = (ring.rank - step) % size
        if step:
            packets.wait()
        key, value = unpack(packets.by_rank[owner], layouts[owner])
        yield _KeyPiece(ring.keys_of(owner).start, key.transpose(1, 2), value.transpose(1, 2))
    packets.wait()


def _all_at_once(
    packets: Packets, layouts: list[Layout], concatenated: Tensor, q: Tensor, ring: Ring
) -> Iterator[_KeyPiece]:
    """Yield all keys, split at the positions where causality changes for the local queries."""
    packets.wait()
    total, (b, heads, _, d) = sum(ring.kv_lengths), layouts[0][0].shape
    dtype = q.dtype
    both = concatenated[: 2 * b * heads * total * d * dtype.itemsize].view(dtype).view(2, b, heads, total, d)
    for owner, (packet, layout) in enumerate(zip(packets.by_rank, layouts, strict=True)):
        keys = ring.keys_of(owner)
        for view, x in zip(both, unpack(packet, layout), strict=True):
            view[:, :, keys.start : keys.stop].copy_(x)
    boundaries = {0, total}
    if ring.causal:
        boundaries |= {min(ring.q_start, total), min(ring.q_start + q.shape[1], total)}
    for begin, end in pairwise(sorted(boundaries)):
        key, value = both[:, :, :, begin:end].transpose(2, 3)
        yield _KeyPiece(begin, key, value)


class _GatheredGradReducer:
    """Sum every rank's dK and dV at the keys' owner; one slice is in transit while the next one is computed."""

    def __init__(self, k: Tensor, ring: Ring) -> None:
        self._k, self._ring, self._dtype = k, ring, ring.accumulation_dtype(k.dtype)
        self._totals = [k.new_empty(k.shape, dtype=self._dtype) for _ in range(2)]
        self._recv_buffer = self._send_buffer = k.new_empty(0, dtype=torch.uint8)
        self._pending: tuple[Heads, Packets] | None = None

    def send(self, heads: Heads, piece_grads: list[tuple[int, Grads]]) -> None:
        """Start to send the gradients of one slice of heads to the owners of the keys.

        Args: piece_grads: (global position of the first key, gradients) for each piece of the keys; 0 for other keys.
        """
        self._receive()
        ring = self._ring
        layouts = [_layout(self._k, heads, n, self._dtype) for n in ring.kv_lengths]
        sizes = _remote_sizes([packet_bytes(layout) for layout in layouts], ring)
        own_sizes = _remote_sizes([packet_bytes(layouts[ring.rank])] * len(sizes), ring)
        if len(self._send_buffer) < sum(sizes) or len(self._recv_buffer) < sum(own_sizes):
            BUFFERS.give(self._send_buffer, self._recv_buffer)
            self._send_buffer = BUFFERS.take(sum(sizes), self._k)
            self._recv_buffer = BUFFERS.take(sum(own_sizes), self._k)
        packets = list(torch.split(self._send_buffer[: sum(sizes)], sizes))
        own_keys = [total[:, :, heads.key].transpose(1, 2) for total in self._totals]
        has_gaps = sum(grads.key.shape[1] for _, grads in piece_grads) < sum(ring.kv_lengths)
        for owner, (packet, layout) in enumerate(zip(packets, layouts, strict=True)):
            views = own_keys if owner == ring.rank else unpack(packet, layout)
            if has_gaps:
                for view in views:
                    view.zero_()
            for start, grads in piece_grads:
                _copy_keys(views, ring.keys_of(owner), (grads.key, grads.value), start)
        incoming = torch.split(self._recv_buffer[: sum(own_sizes)], own_sizes)
        self._pending = (heads, exchange_packets(packets, incoming, group=ring.process_group))

    def finish(self) -> list[Tensor]:
        """Return dK and dV of this rank's keys, [b, s, hk, d], summed over ranks."""
        self._receive()
        BUFFERS.give(self._send_buffer, self._recv_buffer)
        return self._totals

    def _receive(self) -> None:
        if self._pending is None:
            return
        heads, packets = self._pending
        packets.wait()
        layout = _layout(self._k, heads, self._k.shape[1], self._dtype)
        for owner, packet in enumerate(packets.by_rank):
            if owner != self._ring.rank:
                for total, grad in zip(self._totals, unpack(packet, layout), strict=True):
                    total[:, :, heads.key].add_(grad.transpose(1, 2))
        self._pending = None


def _copy_keys(views: list[Tensor], owned: range, grads: tuple[Tensor, Tensor], start: int) -> None:
    """Copy the gradients of an owner's keys from one piece [b, sk, heads, d] to `views` [b, heads, s_owner, d]."""
    begin, end = max(owned.start, start), min(owned.stop, start + grads[0].shape[1])
    if begin < end:
        for view, x in zip(views, grads, strict=True):
            overlap = x[:, begin - start : end - start].transpose(1, 2)
            view[:, :, begin - owned.start : end - owned.start].copy_(overlap)


def _remote_sizes(sizes: Sequence[int], ring: Ring) -> list[int]:
    """Return the bytes of each rank's packet; 0 for this rank, which sends itself nothing."""
    return [0 if rank == ring.rank else size for rank, size in enumerate(sizes)]


def _slices(q: Tensor, k: Tensor, length: int) -> list[Heads]:
    """Split the heads into even slices of about `SLICE_BYTES` of gathered K and V; the same on every rank."""
    bytes_ = 2 * length * k.shape[0] * k.shape[2] * k.shape[3] * k.element_size()
    return slice_heads(q.shape[2], k.shape[2], -(-bytes_ // SLICE_BYTES.get(k.device.type, 64 << 20)))


def _layout(k: Tensor, heads: Heads, length: int, dtype: torch.dtype | None = None) -> Layout:
    """Return the layout of a packet with K and V of `length` keys, [b, heads, length, d]: kernels are faster on it."""
    return [Piece((k.shape[0], heads.num_keys, length, k.shape[3]), dtype or k.dtype)] * 2


def _mask_of_all(mask: Tensor | None, ring: Ring) -> Tensor | None:
    """Return the mask over all keys, [b or 1, hq or 1, sq or 1, sk_global]; a key mask is all-gathered.

    Ranks: all of `ring.group` for a key mask.
    """
    if mask is None or ring.mask_kind != "key_mask":
        return mask
    layouts = [[Piece((*mask.shape[:3], n), mask.dtype)] for n in ring.kv_lengths]
    return torch.cat(
        [x for (x,) in all_gather_tensors([mask], layouts, device=mask.device, group=ring.process_group)], -1
    )
