"""Quantise a frozen transformer with optimum-quanto, for a LoRA on top of it."""

from __future__ import annotations

from typing import Any

from torch import nn

WEIGHTS = ("int8",)


def quantize_base(transformer: nn.Module, weights: str = "int8") -> None:
    """Quantise the weights of the linear layers in a transformer's blocks, in place. Call it before `add_lora`.

    Every rank must hold the whole transformer: FSDP cannot shard quantised weights.

    Args: weights: "int8".
    Raises:
        ValueError: another kind of weights.
        ImportError: optimum-quanto is not installed.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights!r} must be one of {', '.join(WEIGHTS)}")
    try:
        from optimum import quanto
    except ImportError:
        raise ImportError("quantised weights need the package optimum-quanto: pip install optimum-quanto") from None
    library: Any = quanto
    library.quantize(transformer, weights=library.qint8, include="*blocks.*")
    library.freeze(transformer)
