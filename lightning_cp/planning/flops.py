"""Floating-point operations of operators, by formulas of attention and matrix products; others by their elements.

PyTorch's own formulas of attention expect [b, h, s, d], and read the tensors of other layouts wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from lightning_cp.compat.dispatch_names import schema_of
from lightning_cp.compat.torch_names import tree_iter

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}  # indices of the two factors
_VIEWS = ("detach", "_unsafe_view", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided", "alias")
_READS = ("_local_scalar_dense",)  # of AdamW's step counters, which are in host memory


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the operations of a call: a multiplication and an addition are two."""
    name = schema_of(func).name.partition("::")[2]
    if name in _PRODUCTS:
        a, b = (args[index] for index in _PRODUCTS[name])
        return int(2 * a.numel() * b.shape[-1])
    if "attention" in name:
        named = dict(zip((x.name for x in schema_of(func).arguments), args, strict=False)) | {**kwargs}
        return _attention(name, args, is_causal=named.get("is_causal") is True)
    if name == "convolution":
        x, weight, *_ = args
        kernel = prod(weight.shape[1:])
        transposed = bool(args[6])
        return int(2 * kernel * (x.numel() // x.shape[1] * weight.shape[0] if transposed else result.numel()))
    if name == "convolution_backward":
        grad, x, weight = args[:3]
        outputs = x.numel() // x.shape[1] * weight.shape[0] if args[7] else grad.numel()
        return int(2 * prod(weight.shape[1:]) * outputs * sum(bool(x) for x in args[10][:2]))
    if is_view(func):
        return 0
    return max((x.numel() for x in tree_iter(result) if isinstance(x, Tensor)), default=0)


def _attention(name: str, args: Sequence[Any], *, is_causal: bool) -> int:
    """Two products of [queries, keys] in forward, and five in backward, of which causality leaves about a half."""
    is_backward = "backward" in name
    q, k, v = args[1:4] if is_backward else args[:3]
    tokens_first = name.startswith("_flash_attention")  # [b, s, h, d], others [b, h, s, d]
    b, h, sq, d = (q.shape[i] for i in ((0, 2, 1, 3) if tokens_first else (0, 1, 2, 3)))
    sk = k.shape[1 if tokens_first else 2]
    widths = 3 * d + 2 * v.shape[-1] if is_backward else d + v.shape[-1]
    return int(2 * b * h * sq * sk * widths) // (2 if is_causal else 1)


def is_view(func: Any) -> bool:
    """Return True if an operator moves no data on the device: its result shares memory, or is not written."""
    schema = schema_of(func)
    name = schema.name.partition("::")[2]
    if name in _VIEWS or name in _READS:
        return True
    aliases = [x.alias_info for x in schema.returns if x.alias_info is not None]
    return bool(aliases) and not any(x.is_write for x in aliases)


def moved_bytes(func: Any, given: Sequence[Tensor], result: Any) -> int:
    """Return the bytes of the inputs and the results of a call; 0 for a view."""
    if is_view(func):
        return 0
    return sum(x.numel() * x.element_size() for x in (*given, *(x for x in tree_iter(result) if isinstance(x, Tensor))))
