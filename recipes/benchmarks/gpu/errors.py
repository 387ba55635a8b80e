"""Stage `errors`: every kernel, dtype and case against softmax attention in float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from lightning_cp.kernels import Kernel, PartialAttentionGrad, attend, attend_backward, choice
from lightning_cp.recipes.benchmarks.gpu.results import Check, Measurement, Result
from lightning_cp.recipes.benchmarks.gpu.timing import dtype_name

# RMS error relative to the largest value; float32 may use TF32 on a GPU
ERROR_LIMITS = {torch.float64: 1e-12, torch.float32: 2e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}
_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped heads": {"key_heads": 2},
    "key mask": {"masked": True},
}
_TITLE = "Largest RMS error of output, LSE and gradients against float64, relative to the largest value"


def kernel_errors(config: DictConfig) -> Iterator[Measurement]:
    """Compare output, LSE and gradients of every kernel and dtype."""
    device = torch.device(config.device)
    for kernel in choice.KERNELS:
        if kernel.device_type in ("any", device.type):
            for dtype in ERROR_LIMITS:
                measure = functools.partial(_all_cases, kernel, dtype, device, config.errors.tokens)
                yield f"{kernel.name}, {dtype_name(dtype)}", measure


def _all_cases(kernel: Kernel, dtype: torch.dtype, device: torch.device, tokens: int, result: Result) -> None:
    """Add one row, and one check for each case that the kernel does not refuse."""
    limit = ERROR_LIMITS[dtype]
    row = [kernel.name, dtype_name(dtype)]
    for case, options in _CASES.items():
        name = f"{kernel.name}, {dtype_name(dtype)}, {case}"
        try:
            error = kernel_error(kernel, dtype, device, tokens, **options)
        except Exception as failure:  # any exception: the other cases are still measured
            error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:120]}"
            result.checks.append(Check(name, error, "runs", False))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # an illegal access leaves no usable device: ends this process
        if isinstance(error, str):
            row.append(error)
        else:
            row.append(f"{error:.1e}")
            result.add_check(f"{name}: error", error, limit, "{:.1e}")
    result.add_row(_TITLE, ["kernel", "dtype", *_CASES], row)


def kernel_error(
    kernel: Kernel,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    *,
    causal: bool = False,
    key_heads: int = 4,
    masked: bool = False,
) -> float | str:
    """Return the largest relative RMS error, or the reason why the kernel refuses the case."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, tokens, heads, 64) for heads in (4, key_heads, key_heads, 4)]
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    mask = torch.rand((2, 1, 1, tokens), generator=generator).to(device) > 0.3 if masked else None
    if (reason := kernel.refusal(q, mask)) is not None:
        return reason
    options: dict[str, Any] = {"mask": mask, "causal": causal, "scale": 64**-0.5}
    part = attend(kernel, q, k, v, **options)
    results = [*part, *attend_backward(kernel, PartialAttentionGrad(grad, None), q, k, v, part, **options)]
    expected = _float64_attention(q, k, v, grad, **options)
    return max(_relative_error(result, exact) for result, exact in zip(results, expected, strict=True))


def _float64_attention(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, mask: Tensor | None, causal: bool, scale: float
) -> list[Tensor]:
    """Compute out, lse, dq, dk, dv of softmax attention in float64. Args: q, k, v, grad: [b, s, h, d]."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    query, key, value = leaves
    groups = q.shape[2] // k.shape[2]
    key, value = key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)
    grads = torch.autograd.grad(out, leaves, grad.double())
    return [out.detach(), scores.logsumexp(-1).transpose(1, 2).detach(), *grads]


def _relative_error(actual: Tensor, exact: Tensor) -> float:
    error = (actual.double() - exact).square().mean().sqrt() / exact.abs().max()
    return float(error.nan_to_num(nan=torch.inf))
