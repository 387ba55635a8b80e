"""Attention on one device. Cases that kernels get wrong are handled here, once for all kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.kernels.choice import choose_kernel
from lightning_cp.kernels.protocol import Grads, Inputs, Kernel, PartialAttention, PartialAttentionGrad, TangentKernel


def accumulation_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse, masks and accumulators: float64 for float64, float32 for all others."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
) -> PartialAttention:
    """Compute attention of q over k and v.

    Args:
        kernel: kernel that computes it.
        q: [b, sq, hq, d].
        k, v: [b, sk, hk, d]; hk divides hq.
        mask: bool (True = attend) or additive, [b or 1, hq or 1, sq or 1, sk]; None: no mask.
        causal: query i sees keys up to i; only with sq = sk and without a mask.
        scale: factor on the scores q k.
    Returns: out in q's dtype, [b, sq, hq, d]; queries without a key: out 0, lse -inf.
    """
    if not (q.shape[1] and k.shape[1] and q.shape[0]):
        return PartialAttention(
            q.new_zeros(q.shape), q.new_full(q.shape[:3], float("-inf"), dtype=accumulation_dtype_of(q.dtype))
        )
    bias = _additive(mask, q.dtype)
    k, v = _for_heads(kernel, q, k, v)
    part = kernel.forward(Inputs(_dense(q), _dense(k), _dense(v)), bias, causal=causal, scale=scale)
    if bias is None:
        return part
    empty = (bias == float("-inf")).all(-1).transpose(1, 2)  # [b or 1, sq or 1, hq or 1]
    return PartialAttention(part.out.masked_fill(empty.unsqueeze(-1), 0), part.lse.masked_fill(empty, float("-inf")))


def attend_backward(
    kernel: Kernel,
    grad: PartialAttentionGrad,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: PartialAttention,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    is_finite: bool = False,
) -> Grads:
    """Compute the gradients of q, k and v through these keys.

    Args:
        grad: gradients of out and lse.
        part: out and lse over these keys and any others.
        is_finite: every query has a key to attend to, so that all values of lse are finite.
        kernel, q, k, v, mask, causal, scale: see `attend`.
    """
    if not (q.shape[1] and k.shape[1] and q.shape[0]):
        return Grads(q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape))
    d, heads = q.shape[-1], k.shape[2]
    out = part.out.to(q.dtype)
    lse = part.lse if is_finite else part.lse.masked_fill(part.lse == float("-inf"), 0)  # no key: P = exp(-inf)
    grad_out, bias = grad.out.to(q.dtype), _additive(mask, q.dtype)
    if grad.lse is not None:  # dS = P (dP - delta + dlse): dlse is one more column of dP
        grad_lse = grad.lse.to(q.dtype).unsqueeze(-1)
        grad_out = torch.cat([grad_out, grad_lse], -1)
        q, k, out = (torch.cat([x, x.new_zeros(*x.shape[:3], 1)], -1) for x in (q, k, out))
        v = torch.cat([v, v.new_ones(*v.shape[:3], 1)], -1)
        if kernel.refusal(q, bias) is not None:  # the extra column exceeds its head size limit: use another kernel
            kernel = choose_kernel("auto", q, bias)
    k, v = _for_heads(kernel, q, k, v)
    inputs, attended = Inputs(_dense(q), _dense(k), _dense(v)), PartialAttention(_dense(out), lse)
    grads = kernel.backward(_dense(grad_out), inputs, attended, bias, causal=causal, scale=scale)
    dq, dk, dv = grads if grad.lse is None else (x[..., :d] for x in grads)
    if heads != dk.shape[2]:
        dk, dv = (x.reshape(*x.shape[:2], heads, -1, d).sum(3) for x in (dk, dv))
    return Grads(dq, dk, dv)


def attend_tangents(
    kernel: TangentKernel,
    inputs: Inputs,
    tangents: Inputs,
    lse: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> PartialAttention:
    """Compute the contribution of these keys to the tangents of out and lse over these keys and any others.

    Args:
        inputs: q, k and v, see `attend`.
        tangents: tangents of `inputs`, in their shapes.
        lse: [b, sq, hq], over all keys.
        kernel, mask, causal, scale: see `attend`.
    Returns: the sums of `TangentKernel.tangents`, in float32 (float64 for float64); 0 for queries without a key.
    """
    q, k, v = inputs
    if not (q.shape[1] and k.shape[1] and q.shape[0]):
        accumulation_dtype = accumulation_dtype_of(q.dtype)
        return PartialAttention(
            q.new_zeros(q.shape, dtype=accumulation_dtype), q.new_zeros(q.shape[:3], dtype=accumulation_dtype)
        )
    lse = lse.masked_fill(lse == float("-inf"), 0)  # no key: P = exp(-inf)
    inputs = Inputs(q, *_for_heads(kernel, q, k, v))
    tangents = Inputs(tangents.query, *_for_heads(kernel, *tangents))
    with torch.autocast(q.device.type, enabled=False):
        return kernel.tangents(inputs, tangents, lse, _additive(mask, q.dtype), causal=causal, scale=scale)


def _dense(x: Tensor) -> Tensor:
    """Return `x` with last stride 1, which kernels assume unchecked, and no broadcast dims, which some copy badly."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def _for_heads(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of K and V to one for each query head if the kernel has no native GQA."""
    heads_per_kv_head = q.shape[2] // k.shape[2]
    if heads_per_kv_head == 1 or kernel.native_gqa:
        return k, v
    return k.repeat_interleave(heads_per_kv_head, 2), v.repeat_interleave(heads_per_kv_head, 2)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a mask to an additive bias of the accumulation dtype; False, and values <= finfo.min / 2, become -inf."""
    if mask is None:
        return None
    accumulation_dtype = accumulation_dtype_of(dtype)
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=accumulation_dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    masked = mask <= torch.finfo(mask.dtype).min / 2
    return mask.to(accumulation_dtype).masked_fill(masked, float("-inf")).contiguous()
