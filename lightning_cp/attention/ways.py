"""Attention over the keys of all ring ranks: on one rank, with an all-gather, or around the ring."""

from __future__ import annotations

from torch import Tensor

from lightning_cp.attention.gathered import gathered_backward, gathered_forward
from lightning_cp.attention.keys import OnlineSoftmax, Ring, attend_keys, key_grads
from lightning_cp.attention.ring import ring_backward, ring_forward
from lightning_cp.kernels import Grads, PartialAttention, PartialAttentionGrad


def attend_ring(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, ring: Ring) -> PartialAttention:
    """Compute attention of the local queries over all keys of the ring, by `ring.rotate_method`.

    Args, Returns, Ranks: see `ring_forward`.
    """
    if ring.group is None:
        softmax = OnlineSoftmax(q, ring)
        softmax.add(attend_keys(q, k, v, mask, start=0, ring=ring))
        return softmax.merged()
    way = gathered_forward if ring.rotate_method == "allgather" else ring_forward
    return way(q, k, v, mask, ring=ring)


def ring_grads(
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    mask: Tensor | None,
    *,
    ring: Ring,
) -> Grads:
    """Compute the gradients of `attend_ring`. Args, Returns, Ranks: see `ring_backward`."""
    if ring.group is None:
        grads = key_grads(grad, q, k, v, part, mask, start=0, ring=ring)
        return Grads(q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)) if grads is None else grads
    way = gathered_backward if ring.rotate_method == "allgather" else ring_backward
    return way(grad, q, k, v, part, mask, ring=ring)
