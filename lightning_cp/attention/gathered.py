"""Attention over all-gathered keys: K and V of all ranks, one slice of heads at a time.

The transfer of the next slice overlaps with the attention of the current one. All keys of a head are available at once,
so partial results are merged only in the first slice and at causal boundaries. Memory is bounded: two receive buffers
of one slice each, used in turn. The transfer of the first slice overlaps with attention over the local keys, on a grid
with the transfer of the queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.attention.heads import Heads, slice_heads, tokens_first
from lightning_cp.attention.keys import ChunkMask, Mask, Ring, mask_of
from lightning_cp.attention.sparse.local import NEEDED
from lightning_cp.attention.sparse.needed import needed_keys
from lightning_cp.comm.packet import BUFFERS, Piece, all_gather_tensors
from lightning_cp.comm.transfer import Pending, exchange_flat, gather_flat
from lightning_cp.device_profile import device_type
from lightning_cp.kernels import Grads

# Bytes of K and V gathered at a time, at least one head: large enough to saturate the bandwidth and the kernel.
SLICE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}


class KeyPiece(NamedTuple):
    """Keys of one kernel call. K and V: [b, sk, heads, d].

    Attributes: start: place of the first key among the ring's; negative: the keys that a sparse mask needs of other
        ranks.
    """

    start: int
    key: Tensor
    value: Tensor
    mask: ChunkMask


class _Slice(NamedTuple):
    """Mask of all keys, for a slice of heads."""

    mask: Mask
    heads: Heads

    def piece(self, start: int, key: Tensor, value: Tensor) -> KeyPiece:
        places = NEEDED if start < 0 else range(start, start + key.shape[1])
        return KeyPiece(start, key, value, mask_of(self.mask, self.heads, places))


def gathered_keys(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring
) -> Iterator[tuple[Heads, Iterator[KeyPiece]]]:
    """Yield slices of heads, each with all keys of the ring in pieces; the next slice is received meanwhile.

    Tokens are gathered as [s, b, heads of K and of V, d], so that all keys of the ring lie in place. With a sparse mask
    only the keys that it needs are received.

    Args: see `ring.ring_keys`.
    Ranks: all of `ring.group`. Each sends its K and V, and a key mask, n - 1 times.
    """
    of_all = _mask_of_all(mask, ring)
    if ring.sparse is not None:
        own, needs = ring.keys_of(ring.rank).start, ring.sparse.needs
        slices = _slices(q, k, needs.largest if ring.row is None else ring.most_keys)
        for heads, wait in needed_keys(k, v, slices, needs, group=ring.process_group):
            yield heads, _own_and_needed(_Slice(of_all, heads), own, k[:, :, heads.key], v[:, :, heads.key], wait)
        return
    slices, total = _slices(q, k, ring.most_keys), sum(ring.kv_lengths)
    largest = max(heads.num_keys for heads in slices)
    buffers = [BUFFERS.take(total * _token_bytes(k, largest), k) for _ in slices[:2]]

    def start(index: int) -> tuple[Tensor, Tensor, Pending]:
        heads = slices[index]
        width, item = 2 * heads.num_keys, _token_bytes(k, heads.num_keys)
        local = BUFFERS.take(k.shape[1] * item, k)
        local_keys = local.view(k.dtype).view(k.shape[1], k.shape[0], width, k.shape[3])
        torch.cat([tokens_first(x[:, :, heads.key]) for x in (k, v)], 2, out=local_keys)
        received = buffers[index % 2][: total * item]
        pending = gather_flat(local, received, [n * item for n in ring.kv_lengths], group=ring.process_group)
        return received.view(k.dtype).view(total, k.shape[0], width, k.shape[3]), local, pending

    following = start(0)
    for index, heads in enumerate(slices):
        received, local, pending = following
        if index + 1 < len(slices):
            following = start(index + 1)
        comes_first = index == 0 and ring.row is None  # a grid merges once, after the row's exchange
        local_keys = (k[:, :, heads.key], v[:, :, heads.key]) if comes_first else None
        yield heads, _pieces(_Slice(of_all, heads), received, pending, local_keys, q, ring)
        BUFFERS.give(local)
    BUFFERS.give(*buffers)


def _own_and_needed(
    of: _Slice, start: int, key: Tensor, value: Tensor, wait: Callable[[], tuple[Tensor, Tensor]]
) -> Iterator[KeyPiece]:
    """Yield this rank's keys, to be used while the others are received, and the needed keys of other ranks."""
    yield of.piece(start, key, value)
    yield of.piece(NEEDED.start, *wait())


def _pieces(
    of: _Slice, received: Tensor, pending: Pending, local_keys: tuple[Tensor, Tensor] | None, q: Tensor, ring: Ring
) -> Iterator[KeyPiece]:
    """Yield the keys of a slice, divided at the positions where causality changes for the local queries.

    Args: received: K and V of all ranks, once `pending` is complete. local_keys: K and V of this rank, to be
        yielded first, while the others are received; None: wait for all.
    """
    local, total = ring.keys_of(ring.rank), received.shape[0]
    bounds = {0, total}
    if local_keys is not None:
        bounds |= {local.start, local.stop}
    if ring.causal:
        bounds |= {ring.count_before(ring.q_start), ring.count_before(ring.q_start + q.shape[1])}
    pieces = list(pairwise(sorted(bounds)))
    if local_keys is not None:
        for begin, end in pieces:
            if local.start <= begin and end <= local.stop:
                yield of.piece(begin, *(x[:, begin - local.start : end - local.start] for x in local_keys))
    pending.wait()
    keys, values = torch.split(tokens_first(received), received.shape[2] // 2, 2)
    for begin, end in pieces:
        if local_keys is None or not (local.start <= begin and end <= local.stop):
            yield of.piece(begin, keys[:, begin:end], values[:, begin:end])


class GatheredGradReducer:
    """Sum every rank's dK and dV at the keys' owner; one slice is in transit while the next one is computed."""

    def __init__(self, k: Tensor, ring: Ring) -> None:
        self._k, self._ring, self._dtype = k, ring, ring.accumulation_dtype(k.dtype)
        self._sums: list[Tensor] = []  # of each slice, in k's dtype, [s_local, b, heads of dK and of dV, d]
        self._pending: tuple[Tensor, Tensor, int, Pending] | None = None

    def send(self, heads: Heads, piece_grads: list[tuple[int, Grads]]) -> None:
        """Start to send the gradients of one slice of heads to the owners of the keys.

        Args: piece_grads: (place of the first key, gradients) for each piece of the keys; 0 for other keys.
        """
        self._receive()
        ring, (b, s, _, d) = self._ring, self._k.shape
        width, item = 2 * heads.num_keys, _token_bytes(self._k, heads.num_keys, self._dtype)
        ranks, total = len(ring.kv_lengths), sum(ring.kv_lengths)
        sent, received = BUFFERS.take(total * item, self._k), BUFFERS.take(ranks * s * item, self._k)
        joined = sent.view(self._dtype).view(total, b, width, d)
        if sum(grads.key.shape[1] for _, grads in piece_grads) < total:
            joined.zero_()
        for start, grads in piece_grads:
            part = joined[start : start + grads.key.shape[1]]
            torch.cat([tokens_first(x) for x in (grads.key, grads.value)], 2, out=part)
        sizes = [n * item for n in ring.kv_lengths]
        are_equal = sizes.count(s * item) == ranks
        splits = None if are_equal else (sizes, [s * item] * ranks)
        pending = exchange_flat(sent, received, splits, group=ring.process_group)
        self._pending = (sent, received, width, pending)

    def finish(self) -> list[Tensor]:
        """Return dK and dV of this rank's keys, in k's dtype, [b, s, hk, d], summed over ranks."""
        self._receive()
        halves = [torch.split(x, x.shape[2] // 2, 2) for x in self._sums]
        both = halves[0] if len(halves) == 1 else [torch.cat(half, 2) for half in zip(*halves, strict=True)]
        return [tokens_first(x) for x in both]

    def _receive(self) -> None:
        if self._pending is None:
            return
        sent, received, width, pending = self._pending
        pending.wait()
        (b, s, _, d), ranks = self._k.shape, len(self._ring.kv_lengths)
        summed = received.view(self._dtype).view(ranks, s, b, width, d).sum(0)
        self._sums.append(summed.to(self._k.dtype))  # half the memory until all slices are there
        BUFFERS.give(sent, received)
        self._pending = None


def _slices(q: Tensor, k: Tensor, length: int) -> Sequence[Heads]:
    """Split the heads into even slices of about `SLICE_BYTES` of gathered K and V; the same on every rank."""
    bytes_ = 2 * length * k.shape[0] * k.shape[2] * k.shape[3] * k.element_size()
    return slice_heads(q.shape[2], k.shape[2], -(-bytes_ // SLICE_BYTES.get(device_type(k), 64 << 20)))


def _token_bytes(k: Tensor, num_keys: int, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of K and V of one token, for some KV heads of all samples."""
    return 2 * k.shape[0] * num_keys * k.shape[3] * (dtype or k.dtype).itemsize


def _mask_of_all(mask: Tensor | None, ring: Ring) -> Mask:
    """Return the mask over all keys of the ring, [b or 1, hq or 1, sq or 1, sk]; a key mask is all-gathered.

    Ranks: all of `ring.group` for a key mask.
    """
    if ring.sparse is not None:
        return ring.sparse
    if mask is None or ring.mask_kind != "key_mask":
        return mask
    layouts = [[Piece((*mask.shape[:3], n), mask.dtype)] for n in ring.kv_lengths]
    return torch.cat(
        [x for (x,) in all_gather_tensors([mask], layouts, device=mask.device, group=ring.process_group)], -1
    )
