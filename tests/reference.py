"""Plain softmax attention in float64, the reference for all kernels and modes."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out [b, s, h, d], lse [b, s, h]) of whole tensors, differentiable; rows without a key: out 0, lse -inf.

    mask: bool (True = attend) or additive with -inf, broadcastable to [b, h, s, keys].
    """
    q, k, v = (x.to(torch.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if not scores.shape[3]:
        return torch.zeros_like(q) + 0 * q, scores.new_full(q.shape[:3], -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf)
    weights = scores.softmax(-1).masked_fill(empty, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse.transpose(1, 2)


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference. Equal infinite values have difference 0; NaN counts as an infinite difference."""
    actual, expected = actual.double(), expected.double()
    same = actual == expected
    difference = (actual - expected).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
    return difference.max().item() if difference.numel() else 0.0
