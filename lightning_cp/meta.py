"""Weights without storage, until they are sharded: no rank ever holds a model in full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Inside, weights of new modules are on the meta device; buffers are real: a checkpoint may not hold them."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def give_storage(module: nn.Module, device: torch.device) -> None:
    """Weights on the meta device get storage: initialised where their module knows how, else NaN until loaded."""

    def stored(x: Tensor) -> Tensor:
        return torch.empty_like(x, device=device) if x.is_meta else x

    for inner in module.modules():
        empty = [name for name, x in inner.named_parameters(recurse=False) if x.is_meta]
        if not empty:
            continue
        inner._apply(stored, recurse=False)  # type: ignore[no-untyped-call]
        reset: Any = getattr(inner, "reset_parameters", None)
        for name in empty:
            parameter = inner._parameters[name]
            if parameter is not None and parameter.is_floating_point():
                parameter.fill_(torch.nan)
        if callable(reset):
            reset()
