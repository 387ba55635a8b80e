"""Attention over gathered keys: every rank's K and V of some heads at a time, the next heads under way meanwhile.

All keys of a head are seen at once, so that nothing is merged; and what is gathered is bounded: two slices of heads.
Only the first slice is not hidden behind another: there, the local keys are attended to until the others have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.attention.keys import Parts, Ring, attend_keys, grads_of_keys
from lightning_cp.comm.rows import Gathering, HomingRows, gather_rows
from lightning_cp.kernels import Grads, Part, PartGrad

# Bytes of K and V that are gathered at a time, if a head is not more: enough for the bandwidth, and for the kernel.
_SLICE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}


class _Slice(NamedTuple):
    """Key-value heads that are gathered together, and the query heads that use them."""

    key: slice
    query: slice

    @property
    def heads(self) -> int:
        return int(self.key.stop - self.key.start)


class _Stretch(NamedTuple):
    """Keys that are attended to at once, by global position. is_own: they are this rank's."""

    start: int
    stop: int
    is_own: bool


def gathered_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring) -> Part:
    """Attention of the local queries over all keys of the ring.

    Args, Returns: as `ring_forward`.
    Ranks: all of `ring.group`. Each sends its K and V, and a "keys" mask, n - 1 times.
    """
    mask = _mask_of_all(mask, ring)
    parts = []
    for index, (heads, buffer, arriving) in enumerate(_gathered(q, k, v, ring)):
        slice_parts, own_q = Parts(q[:, :, heads.query], ring), q[:, :, heads.query]
        for keys in _stretches(ring, q.shape[1], own_first=index == 0):
            if not keys.is_own:
                arriving.wait()
            key, value = _keys_and_values(buffer, keys)
            seen = _mask_of(mask, heads, keys)
            slice_parts.add(attend_keys(own_q, key, value, seen, start=keys.start, ring=ring))
        arriving.wait()
        parts.append(slice_parts.merged())
    if len(parts) == 1:
        return parts[0]
    return Part(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


def gathered_backward(
    grad: PartGrad, q: Tensor, k: Tensor, v: Tensor, part: Part, mask: Tensor | None, *, ring: Ring
) -> Grads:
    """The adjoint of `gathered_forward`, from its inputs and result alone: K and V are gathered once more.

    Args, Returns: as `ring_backward`.
    Ranks: all of `ring.group`. Each sends its K, V and mask n - 1 times, and dK and dV of every other rank's keys (in
        float32 where `wide`).
    """
    mask, dtype = _mask_of_all(mask, ring), ring.sums_in(q.dtype)
    homing = HomingRows(ring.kv_lengths, group=ring.several)
    queries, totals = [], []
    shares = k.new_empty(0)
    for index, (heads, buffer, arriving) in enumerate(_gathered(q, k, v, ring)):
        of_slice = PartGrad(grad.out[:, :, heads.query], None if grad.lse is None else grad.lse[:, :, heads.query])
        own_q, own_part = q[:, :, heads.query], Part(part.out[:, :, heads.query], part.lse[:, :, heads.query])
        found: list[tuple[_Stretch, Grads]] = []
        for keys in _stretches(ring, q.shape[1], own_first=index == 0):
            if not keys.is_own:
                arriving.wait()
            key, value = _keys_and_values(buffer, keys)
            seen = _mask_of(mask, heads, keys)
            grads = grads_of_keys(of_slice, own_q, key, value, own_part, seen, start=keys.start, ring=ring)
            if grads is not None:
                found.append((keys, grads))
        arriving.wait()
        homing.finish()
        if shares.shape != buffer.shape:
            shares = buffer.new_empty(buffer.shape, dtype=dtype)
        _fill(shares, found)
        own = ring.keys_of(ring.rank)
        totals.append(buffer.new_empty(len(own), *buffer.shape[1:], dtype=dtype))
        homing.send(shares, totals[-1])
        queries.append(_sum_of_queries([grads for _, grads in found], own_q, dtype))
    homing.finish()
    total = totals[0] if len(totals) == 1 else torch.cat(totals, 3)
    dk, dv = (k.new_empty(k.shape).copy_(x.transpose(0, 1)) for x in total.unbind(2))
    dq = queries[0] if len(queries) == 1 else torch.cat(queries, 2)
    return Grads(dq.to(q.dtype), dk, dv)


def _gathered(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[_Slice, Tensor, Gathering]]:
    """K and V of all ranks, [sk_global, b, 2, heads, d], a slice of heads at a time; others' are there after `wait`."""
    slices = _slices(q, k, sum(ring.kv_lengths))
    own, total, b, d = ring.keys_of(ring.rank), sum(ring.kv_lengths), k.shape[0], k.shape[3]
    widest = max(heads.heads for heads in slices)
    room = [k.new_empty(total * b * 2 * widest * d) for _ in slices[:2]]

    def start(index: int) -> tuple[_Slice, Tensor, Gathering]:
        heads = slices[index]
        buffer = room[index % 2][: total * b * 2 * heads.heads * d].view(total, b, 2, heads.heads, d)
        for place, x in zip(buffer[own.start : own.stop].unbind(2), (k, v), strict=True):
            place.copy_(x[:, :, heads.key].transpose(0, 1))
        return heads, buffer, gather_rows(buffer, ring.kv_lengths, group=ring.several)

    following = start(0)
    for index in range(len(slices)):
        current = following
        if index + 1 < len(slices):
            following = start(index + 1)
        yield current


def _slices(q: Tensor, k: Tensor, length: int) -> list[_Slice]:
    """All heads, in even slices of about `_SLICE_BYTES` once gathered; the same on every rank."""
    hk, group = k.shape[2], q.shape[2] // k.shape[2]
    bytes_ = 2 * length * k.shape[0] * hk * k.shape[3] * k.element_size()
    count = min(hk, -(-bytes_ // _SLICE_BYTES.get(k.device.type, 64 << 20))) or 1
    bounds = [index * hk // count for index in range(count + 1)]
    return [_Slice(slice(a, b), slice(a * group, b * group)) for a, b in pairwise(bounds)]


def _stretches(ring: Ring, sq: int, *, own_first: bool) -> Sequence[_Stretch]:
    """The keys, cut where the local queries begin to see them differently; this rank's apart, and first, if asked."""
    own, total = ring.keys_of(ring.rank), sum(ring.kv_lengths)
    cuts = {0, total}
    if own_first:
        cuts |= {own.start, own.stop}
    if ring.causal:
        cuts |= {min(ring.q_start, total), min(ring.q_start + sq, total)}
    found = [
        _Stretch(start, stop, own_first and own.start <= start and stop <= own.stop)
        for start, stop in pairwise(sorted(cuts))
        if not ring.causal or start < ring.q_start + sq
    ]
    return sorted(found, key=lambda keys: not keys.is_own)


def _keys_and_values(buffer: Tensor, keys: _Stretch) -> tuple[Tensor, Tensor]:
    """[b, sk, heads, d] each, as views."""
    key, value = buffer[keys.start : keys.stop].transpose(0, 1).unbind(2)
    return key, value


def _mask_of_all(mask: Tensor | None, ring: Ring) -> Tensor | None:
    """A mask of all keys, [b or 1, hq or 1, sq or 1, sk_global]. Ranks: all of `ring.group`, where it is of keys."""
    if mask is None or ring.mask_kind != "keys":
        return mask
    own, (b, heads, _, _) = ring.keys_of(ring.rank), mask.shape
    buffer = mask.new_empty(sum(ring.kv_lengths), b, heads)
    buffer[own.start : own.stop] = mask[:, :, 0].permute(2, 0, 1)
    gather_rows(buffer, ring.kv_lengths, group=ring.several).wait()
    return buffer.permute(1, 2, 0).unsqueeze(2)


def _mask_of(mask: Tensor | None, heads: _Slice, keys: _Stretch) -> Tensor | None:
    if mask is None:
        return None
    return mask[:, heads.query if mask.shape[1] > 1 else slice(None), :, keys.start : keys.stop]


def _fill(shares: Tensor, found: Sequence[tuple[_Stretch, Grads]]) -> None:
    """dK and dV of every stretch into [sk_global, b, 2, heads, d]; 0 where nothing was seen."""
    if sum(keys.stop - keys.start for keys, _ in found) < len(shares):
        shares.zero_()
    for keys, grads in found:
        for place, x in zip(shares[keys.start : keys.stop].unbind(2), (grads.key, grads.value), strict=True):
            place.copy_(x.transpose(0, 1))


def _sum_of_queries(found: Sequence[Grads], q: Tensor, dtype: torch.dtype) -> Tensor:
    if len(found) == 1:
        return found[0].query
    total = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for grads in found:
        total.add_(grads.query)
    return total
