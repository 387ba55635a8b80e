"""Check the arguments of `context_parallel_attention` that need no other rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_types(**tensors: object) -> None:
    """Check that arguments are tensors (only `attn_mask` may be None). Raises: TypeError."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and not (name == "attn_mask" and x is None):
            remedy = "; give a bool or additive mask" if name == "attn_mask" else ""
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}{remedy}")


def check_settings(dropout_p: object, is_causal: object, scale: object, enable_gqa: object) -> None:
    """Check the arguments that are no tensors. Raises: TypeError: a wrong type. ValueError: a wrong value."""
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p} must be 0: dropout of attention weights is not implemented")
    for name, value in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True or False")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale={scale!r} must be a number, or None for head_dim ** -0.5")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale!r} must be finite")


def lengths_of(name: str, lengths: Sequence[int] | None) -> list[int]:
    """Return the argument `q_lengths` or `kv_lengths` as a list, empty if it is None. Raises: TypeError."""
    if lengths is None:
        return []
    if type(lengths) is list and set(map(type, lengths)) == {int}:
        return lengths
    if not isinstance(lengths, (list, tuple)) or any(isinstance(x, bool) or not isinstance(x, int) for x in lengths):
        raise TypeError(f"{name}={lengths!r} must be a list with one int for each rank of the context group")
    return list(lengths)


def attention_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which attention computes `x`: that of autocast, if it is on and `x` is not float64."""
    device = x.device.type
    if x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)
