"""The local queries over some of the keys: what both ways of meeting every rank's keys are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.attention.heads import Heads
from lightning_cp.attention.merge import accumulator, merge
from lightning_cp.kernels import (
    Grads,
    Inputs,
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
class Ring:
    """What one attention over the keys of several ranks knows beside its tensors.

    Attributes:
        group: None for a ring of one.
        q_start: global position of the first local query.
        kv_lengths: keys of each rank of the ring, in order.
        mask_kind: "keys" travels with its keys, "rows" holds a row of all keys for each local query; "" without mask.
        kernel: a name of `kernels.KERNEL_NAMES`.
        rotate_method: "allgather" (`gathered.py`) or "alltoall" (`ring.py`).
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
    accumulate_fp32: bool

    @property
    def rank(self) -> int:
        """This rank's place in the ring."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def several(self) -> dist.ProcessGroup:
        """`group`, of a ring of more than one."""
        assert self.group is not None, "a ring of one rank exchanges nothing"
        return self.group

    def keys_of(self, owner: int) -> range:
        """Global positions of a rank's keys."""
        start = sum(self.kv_lengths[:owner])
        return range(start, start + self.kv_lengths[owner])

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What tensors of `dtype` are summed in."""
        return accumulation_dtype_of(dtype) if self.accumulate_fp32 else dtype


def part_of(part: PartialAttention, heads: Heads) -> PartialAttention:
    """Some heads' share of out and lse."""
    return PartialAttention(part.out[:, :, heads.query], part.lse[:, :, heads.query])


def grad_of(grad: PartialAttentionGrad, heads: Heads) -> PartialAttentionGrad:
    """Some heads' share of the gradients of out and lse."""
    return PartialAttentionGrad(grad.out[:, :, heads.query], None if grad.lse is None else grad.lse[:, :, heads.query])


def mask_of(mask: Tensor | None, heads: Heads, keys: range) -> Tensor | None:
    """What some heads see of some of the keys. Args: mask: of all keys, [b or 1, hq or 1, sq or 1, sk_global]."""
    if mask is None:
        return None
    return mask[:, heads.query if mask.shape[1] > 1 else slice(None), :, keys.start : keys.stop]


class _View(NamedTuple):
    """How the local queries see a stretch of keys."""

    mask: Tensor | None
    causal: bool


def attend_keys(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, start: int, ring: Ring
) -> PartialAttention | None:
    """Attention of the local queries over a stretch of the keys; None if they see nothing of it.

    Args:
        q: [b, sq_local, hq, d]. k, v: [b, sk, hk, d], the keys from global position `start` on.
        mask: of these keys, [b or 1, hq or 1, sq_local or 1, sk]; None: all.
    """
    view = _view(q, k, mask, start=start, ring=ring)
    if view is None:
        return None
    kernel = choose_kernel(ring.kernel, q, view.mask)
    return attend(kernel, q, k, v, mask=view.mask, causal=view.causal, scale=ring.scale)


def key_grads(
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    mask: Tensor | None,
    *,
    start: int,
    ring: Ring,
) -> Grads | None:
    """This rank's share of the gradients through a stretch of the keys; None if its queries see nothing of it.

    Args: as of `attend_keys`. part: over all keys.
    """
    view = _view(q, k, mask, start=start, ring=ring)
    if view is None:
        return None
    kernel = choose_kernel(ring.kernel, q, view.mask)
    return attend_backward(kernel, grad, q, k, v, part, mask=view.mask, causal=view.causal, scale=ring.scale)


def key_tangents(
    inputs: Inputs, tangents: Inputs, lse: Tensor, mask: Tensor | None, *, start: int, ring: Ring
) -> PartialAttention | None:
    """What a stretch of the keys adds to the tangents of out and lse; None if the local queries see nothing of it.

    Args: inputs: as of `attend_keys`. tangents: of `inputs`. lse: over all keys. Returns: see `TangentKernel`.
    """
    view = _view(inputs.query, inputs.key, mask, start=start, ring=ring)
    if view is None:
        return None
    kernel = choose_tangent_kernel(ring.kernel)
    return attend_tangents(kernel, inputs, tangents, lse, mask=view.mask, causal=view.causal, scale=ring.scale)


class OnlineSoftmax:
    """Merges the attention of the local queries over one stretch of keys after another."""

    def __init__(self, q: Tensor, ring: Ring) -> None:
        self._q, self._dtype = q, ring.accumulation_dtype(q.dtype)
        self._total: PartialAttention | None = None
        self._alone = True

    def add(self, part: PartialAttention | None) -> None:
        """Args: part: its memory is taken over; None: nothing was seen."""
        if part is None:
            return
        if self._total is None:
            self._total = part
            return
        self._total = merge(accumulator(self._total, self._dtype) if self._alone else self._total, part)
        self._alone = False

    def merged(self) -> PartialAttention:
        """Over all stretches: out in q's dtype; 0, and lse -inf, where there was none."""
        if self._total is None:  # every key lies after every query
            q = self._q
            return PartialAttention(
                torch.zeros_like(q), q.new_full(q.shape[:3], float("-inf"), dtype=accumulation_dtype_of(q.dtype))
            )
        return PartialAttention(self._total.out.to(self._q.dtype), self._total.lse)


def _view(q: Tensor, key: Tensor, mask: Tensor | None, *, start: int, ring: Ring) -> _View | None:
    """What of these keys the local queries may see; None if nothing."""
    sq, sk = q.shape[1], key.shape[1]
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
