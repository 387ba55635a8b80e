"""Reference kernel: plain matrix products and softmax, on any device and dtype, with O(sq sk) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.kernels.protocol import Grads, Inputs, PartialAttention

# Maximum number of scores that the forward derivative holds at once: it processes queries in blocks.
_SCORES_AT_A_TIME = 1 << 24


class MathKernel:
    """Reference kernel; computes in float32 for all dtypes (float64 for float64)."""

    name = "math"
    device_type = "any"
    native_gqa = False

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        return None

    def forward(self, inputs: Inputs, mask: Tensor | None, *, causal: bool, scale: float) -> PartialAttention:
        query, key, value = inputs
        scores = _scores(query, key, mask, causal, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        out = torch.einsum("bhqk,bkhd->bqhd", weights, value.to(scores.dtype))
        return PartialAttention(out.to(query.dtype), lse.transpose(1, 2))

    def backward(
        self, grad: Tensor, inputs: Inputs, part: PartialAttention, mask: Tensor | None, *, causal: bool, scale: float
    ) -> Grads:
        query, key, value = inputs
        scores = _scores(query, key, mask, causal, scale)
        accumulation_dtype = scores.dtype
        grad = grad.to(accumulation_dtype)
        delta = (grad * part.out.to(accumulation_dtype)).sum(-1)
        weights = (scores - part.lse.to(accumulation_dtype).transpose(1, 2).unsqueeze(-1)).exp()
        grad_weights = torch.einsum("bqhd,bkhd->bhqk", grad, value.to(accumulation_dtype))
        grad_scores = weights * (grad_weights - delta.transpose(1, 2).unsqueeze(-1)) * scale
        return Grads(
            torch.einsum("bhqk,bkhd->bqhd", grad_scores, key.to(accumulation_dtype)).to(query.dtype),
            torch.einsum("bhqk,bqhd->bkhd", grad_scores, query.to(accumulation_dtype)).to(key.dtype),
            torch.einsum("bhqk,bqhd->bkhd", weights, grad).to(value.dtype),
        )

    def tangents(
        self, inputs: Inputs, tangents: Inputs, lse: Tensor, mask: Tensor | None, *, causal: bool, scale: float
    ) -> PartialAttention:
        accumulation_dtype = torch.promote_types(inputs.query.dtype, torch.float32)
        (q, k, v), (dq, dk, dv) = ([x.to(accumulation_dtype) for x in tensors] for tensors in (inputs, tangents))
        outs, sums = [], []
        (b, sq, h, _), sk = q.shape, k.shape[1]
        step = max(1, _SCORES_AT_A_TIME // (b * h * sk))
        for first in range(0, sq, step):
            block = slice(first, first + step)
            block_mask = mask if mask is None or mask.shape[2] == 1 else mask[:, :, block]
            scores = _scores(q[:, block], k, block_mask, causal, scale, first=first)
            weights = (scores - lse[:, block].to(accumulation_dtype).transpose(1, 2).unsqueeze(-1)).exp()
            score_tangents = torch.einsum("bqhd,bkhd->bhqk", dq[:, block], k) + torch.einsum(
                "bqhd,bkhd->bhqk", q[:, block], dk
            )
            score_tangents = weights * score_tangents * scale
            outs.append(
                torch.einsum("bhqk,bkhd->bqhd", score_tangents, v) + torch.einsum("bhqk,bkhd->bqhd", weights, dv)
            )
            sums.append(score_tangents.sum(-1).transpose(1, 2))
        return PartialAttention(torch.cat(outs, 1), torch.cat(sums, 1))


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float, *, first: int = 0) -> Tensor:
    """Compute scores [b, h, sq, sk]. Args: first: position of the first query, for `causal`."""
    accumulation_dtype = torch.promote_types(query.dtype, torch.float32)
    scores = torch.einsum("bqhd,bkhd->bhqk", query.to(accumulation_dtype), key.to(accumulation_dtype)) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + first)
        scores = scores.masked_fill(future, float("-inf"))
    return scores
