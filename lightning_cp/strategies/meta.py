"""Weights without storage, until they are sharded: no rank ever holds a model in full."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_cp.strategies.strategy import class_of


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Inside, weights of new modules are on the meta device; buffers are real: a checkpoint may not hold them."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # one that is was registered before: tied weights stay tied
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, *, sent: Set[str] = frozenset()) -> None:
    """Allocate what is on the meta device: initialised where its module knows how, else NaN until loaded.

    Args:
        module: with parameters and buffers on the meta device, or without.
        device: where they are allocated.
        sent: names of those that another rank sends next. A module that lacks only such is not initialised.
    """

    def stored(x: Tensor) -> Tensor:
        return torch.empty_like(x, device=device) if x.is_meta else x

    given, tied = [], dict[nn.Parameter, nn.Parameter | None]()
    for path, inner in module.named_modules():
        for name, parameter in inner._parameters.items():
            if parameter in tied:
                inner._parameters[name] = tied[parameter]
        without = {name: x for name, x in inner._parameters.items() if x is not None and x.is_meta}
        empty = {name for name, x in _own(inner) if x.is_meta}
        if not empty:
            continue
        inner._apply(stored, recurse=False)
        tied.update({x: inner._parameters[name] for name, x in without.items()})
        for name, x in _own(inner):
            if name in empty and x.is_floating_point():
                x.fill_(torch.nan)
        if not {f"{path}.{name}".lstrip(".") for name in empty} <= sent:
            given.append(inner)
    unset = {class_of(inner).__name__ for inner in given if not _reset(inner)}
    if unset:
        rank_zero_warn(
            "Parameter initialization incomplete: modules that don't define a `reset_parameters()` method for "
            f"re-initialization: {', '.join(sorted(unset))}. What they hold is NaN until a checkpoint is loaded."
        )


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))


def _reset(module: nn.Module) -> bool:
    """Whether a module could be initialised."""
    reset: Any = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    return callable(reset)
