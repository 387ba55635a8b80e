"""Ring attention: every query meets every rank's keys, one chunk at a time. The only ring loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.attention.merge import accumulator, merge
from lightning_cp.comm.packet import Layout, Piece
from lightning_cp.comm.rotation import (
    DirectHoming,
    Homing,
    NeighbourHoming,
    rotate_direct,
    rotate_neighbour,
)
from lightning_cp.kernels import Grads, Part, PartGrad, attend, attend_backward, choose_kernel, wide_dtype


@dataclass(frozen=True)
class Ring:
    """What one ring attention knows beside its tensors.

    Attributes:
        group: None for a ring of one.
        q_start: global position of the first local query.
        kv_lengths: keys of each rank of the ring, in order.
        mask_kind: "keys" travels with its keys, "rows" holds a row of all keys for each local query; "" without mask.
        kernel: a name of `kernels.KERNEL_NAMES`.
        rotate_method: "allgather" or "alltoall".
        wide: merge and sum in float32 (float64 for float64); else in the inputs' dtype.
    """

    group: dist.ProcessGroup | None
    q_start: int
    kv_lengths: tuple[int, ...]
    mask_kind: str
    causal: bool
    scale: float
    kernel: str
    rotate_method: str
    wide: bool

    @property
    def rank(self) -> int:
        """This rank's place in the ring."""
        return 0 if self.group is None else dist.get_rank(self.group)


class _View(NamedTuple):
    """How the local queries see one chunk of keys."""

    mask: Tensor | None
    causal: bool


def ring_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring) -> Part:
    """Attention of the local queries over all keys of the ring.

    Args:
        q: [b, sq_local, hq, d]. k, v: [b, sk_local, hk, d]. mask: [b or 1, hq or 1, 1, sk_local] ("keys") or
            [b or 1, hq or 1, sq_local or 1, sk_global] ("rows").
    Returns: out [b, sq_local, hq, d] in q's dtype, lse [b, sq_local, hq].
    Ranks: all of `ring.group`. Each sends (n - 1) packets of K, V and a "keys" mask.
    """
    dtype = wide_dtype(q.dtype) if ring.wide else q.dtype
    total: Part | None = None
    for owner, chunk in _chunks(ring, k, v, mask):  # `chunk` is the only name for it here, so that it can be let go
        part = _attend_chunk(q, chunk, mask, owner=owner, ring=ring)
        if part is None:
            continue
        if len(ring.kv_lengths) == 1:
            return part
        total = accumulator(part, dtype) if total is None else merge(total, part)
    if total is None:  # every key lies after every query
        return Part(torch.zeros_like(q), q.new_full(q.shape[:3], float("-inf"), dtype=wide_dtype(q.dtype)))
    return Part(total.out.to(q.dtype), total.lse)


def ring_backward(
    grad: PartGrad, q: Tensor, k: Tensor, v: Tensor, part: Part, mask: Tensor | None, *, ring: Ring
) -> Grads:
    """The adjoint of `ring_forward`, from its inputs and result alone: K and V pass once more.

    Args: as there.
    Returns: dq, dk, dv of the local q, k, v, in their dtypes.
    Ranks: all of `ring.group`. Each sends (n - 1) packets of K, V and mask, and (n - 1) of dK and dV (in float32 where
        `wide`).
    """
    dtype = wide_dtype(q.dtype) if ring.wide else q.dtype
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    homing = _homing(ring, k, v, dtype)
    for owner, chunk in _chunks(ring, k, v, mask):
        grads = _chunk_grads(grad, q, chunk, part, mask, owner=owner, ring=ring)
        if grads is None:
            shares = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in chunk[:2]]
        else:
            if homing is None:
                return grads
            dq.add_(grads.query)
            shares = [x.to(dtype, memory_format=torch.contiguous_format) for x in (grads.key, grads.value)]
        if homing is None:
            return Grads(dq.to(q.dtype), shares[0].to(k.dtype), shares[1].to(v.dtype))
        homing.add(owner, shares)
    assert homing is not None, "a ring of one has returned"
    dk, dv = homing.finish()
    return Grads(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


def _attend_chunk(q: Tensor, chunk: list[Tensor], mask: Tensor | None, *, owner: int, ring: Ring) -> Part | None:
    """Attention of the local queries over `owner`'s chunk; None if they see nothing of it."""
    key, value, *key_mask = chunk
    view = _view(ring, owner, q, key, mask, key_mask)
    if view is None:
        return None
    kernel = choose_kernel(ring.kernel, q, view.mask)
    return attend(kernel, q, key, value, mask=view.mask, causal=view.causal, scale=ring.scale)


def _chunk_grads(
    grad: PartGrad, q: Tensor, chunk: list[Tensor], part: Part, mask: Tensor | None, *, owner: int, ring: Ring
) -> Grads | None:
    """This rank's share of the gradients through `owner`'s chunk; None if the local queries see nothing of it."""
    key, value, *key_mask = chunk
    view = _view(ring, owner, q, key, mask, key_mask)
    if view is None:
        return None
    kernel = choose_kernel(ring.kernel, q, view.mask)
    return attend_backward(kernel, grad, q, key, value, part, mask=view.mask, causal=view.causal, scale=ring.scale)


def _chunks(ring: Ring, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[tuple[int, list[Tensor]]]:
    local = [k, v] if mask is None or ring.mask_kind != "keys" else [k, v, mask]
    if ring.group is None:
        return iter([(0, local)])
    rotate = rotate_neighbour if ring.rotate_method == "alltoall" else rotate_direct
    return rotate(local, lambda owner: _layout(local, ring.kv_lengths[owner]), group=ring.group)


def _homing(ring: Ring, k: Tensor, v: Tensor, dtype: torch.dtype) -> Homing | None:
    if ring.group is None:
        return None
    kind = NeighbourHoming if ring.rotate_method == "alltoall" else DirectHoming
    return kind(lambda owner: _layout([k, v], ring.kv_lengths[owner], dtype), group=ring.group)


def _layout(local: list[Tensor], length: int, dtype: torch.dtype | None = None) -> Layout:
    """The layout of a rank's chunk that holds `length` keys: K and V [b, length, hk, d], mask [.., .., 1, length]."""
    pieces = []
    for index, x in enumerate(local):
        shape = list(x.shape)
        shape[1 if index < 2 else 3] = length
        pieces.append(Piece(tuple(shape), dtype or x.dtype))
    return pieces


def _view(ring: Ring, owner: int, q: Tensor, key: Tensor, mask: Tensor | None, key_mask: list[Tensor]) -> _View | None:
    """What of `owner`'s keys the local queries may see; None if nothing."""
    start, sq, sk = sum(ring.kv_lengths[:owner]), q.shape[1], key.shape[1]
    if key_mask:
        mask = key_mask[0]
    elif mask is not None:
        mask = mask[..., start : start + sk]
    if not ring.causal or start + sk <= ring.q_start + 1:
        return _View(mask, causal=False)
    if start >= ring.q_start + sq:
        return None
    if start == ring.q_start and sq == sk and mask is None:
        return _View(None, causal=True)
    rows = torch.arange(ring.q_start, ring.q_start + sq, device=q.device)
    seen = (torch.arange(start, start + sk, device=q.device) <= rows.unsqueeze(1))[None, None]
    if mask is None:
        return _View(seen, causal=False)
    if mask.dtype == torch.bool:
        return _View(mask & seen, causal=False)
    return _View(mask.masked_fill(~seen, float("-inf")), causal=False)
