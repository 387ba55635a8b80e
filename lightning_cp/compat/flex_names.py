"""PyTorch's operators for flex attention. Import this only to run on a GPU: it loads the compiler."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_MODULE = "torch._higher_order_ops.flex_attention"


def _operator(name: str) -> Callable[..., Any] | None:
    """Return an operator; None if this version of PyTorch has it elsewhere."""
    try:
        return getattr(importlib.import_module(_MODULE), name, None)
    except ImportError:
        return None


flex_forward, flex_backward = _operator("flex_attention"), _operator("flex_attention_backward")
