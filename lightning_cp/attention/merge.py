"""Merge partial attentions by their LSE."""

from __future__ import annotations

import functools
import importlib.util

import torch

from lightning_cp.device_profile import device_type, is_assumed
from lightning_cp.errors import ShapeError
from lightning_cp.kernels import PartialAttention


def merge(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Merge attention over two disjoint sets of keys into attention over their union.

    w = sigmoid(lse_b - lse_a);  out = out_a + w (out_b - out_a);  lse = log(exp(lse_a) + exp(lse_b))

    Args:
        a: out [b, s, h, d], lse [b, s, h] (natural log). Queries without a key: lse -inf, out 0. Its tensors are
            reused.
        b: same shapes as `a`.
    Returns: out and lse over the union, in a's dtypes; queries without a key in a and b: out 0, lse -inf.
    Raises: ShapeError: the shapes differ.
    Source: Milakov and Gimelshein, arXiv:1805.02867.
    """
    if a.out.shape != b.out.shape or a.lse.shape != b.lse.shape:
        raise ShapeError(
            f"attention of shapes {tuple(a.out.shape)} and {tuple(b.out.shape)} cannot be merged: they must be equal"
        )
    if device_type(a.out) == "cuda" and a.out.dtype == torch.float32 and (is_assumed() or _has_triton()):
        if is_assumed():  # one operator in place of the kernel, with its memory traffic
            return PartialAttention(a.out.add_(b.out), a.lse)
        from lightning_cp.attention.merge_triton import merge_in_place

        return merge_in_place(a, b)
    difference = torch.nan_to_num(b.lse - a.lse, nan=0.0)  # -inf - -inf: out is 0 in both, any weight is valid
    weight = difference.sigmoid_().unsqueeze(-1).to(a.out.dtype)
    return PartialAttention(a.out.lerp_(b.out.to(a.out.dtype), weight), torch.logaddexp(a.lse, b.lse))


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def accumulator(part: PartialAttention, dtype: torch.dtype) -> PartialAttention:
    """Convert `out` to `dtype`, for the argument `a` of `merge`, which overwrites it."""
    return PartialAttention(part.out.to(dtype), part.lse)
