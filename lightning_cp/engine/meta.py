"""Create weights on the meta device and allocate only those that this rank holds: no rank ever holds a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_cp.engine.paths import class_of

_SHAPE = "_lightning_cp_shape"  # attribute of a freed weight: the shape that it had
_LOADER = "_lightning_cp_load"  # attribute of a module: a function that loads its weights after their allocation


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Create weights on the meta device inside the context. Buffers get storage: a checkpoint may not hold them."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # keep one already there: tied weights stay tied
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create floating-point tensors with this dtype inside the context, unless another one is given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load_when_allocated(module: nn.Module, load: Callable[[nn.Module], None]) -> None:
    """Register a function that loads the weights of `module`. It is called once these weights are allocated.

    Args: load: fills the weights, whole or sharded, on each rank; no collectives.
    """
    setattr(module, _LOADER, load)


def deferred_loads(module: nn.Module, *, excluded: Set[str] = frozenset()) -> DeferredLoads:
    """Find the inner modules with a loader (`load_when_allocated`) and weights on the meta device.

    Args: excluded: names of weights that have another source.
    """
    loads, names = [], set[str]()
    for path, inner in module.named_modules():
        load = getattr(inner, _LOADER, None)
        tensors = (*inner.named_parameters(path, remove_duplicate=False), *inner.named_buffers(path)) if load else ()
        names_on_meta = {name for name, x in tensors if x.is_meta} - excluded
        if names_on_meta and load:
            loads.append((inner, load))
            names |= names_on_meta
    return DeferredLoads(frozenset(names), tuple(loads))


@dataclass(frozen=True)
class DeferredLoads:
    """Weights that are loaded after their allocation.

    Attributes:
        names: names of these weights; they are on the meta device.
        loads: modules and the functions that load their weights.
    """

    names: frozenset[str]
    loads: tuple[tuple[nn.Module, Callable[[nn.Module], None]], ...]

    def run(self) -> None:
        """Load the weights."""
        for module, load in self.loads:
            load(module)


def load_deferred(module: nn.Module) -> None:
    """Allocate in host memory what is on the meta device, and load it, for sampling. Raises: ValueError: bad files."""
    loads = deferred_loads(module)
    if loads.names:
        materialize(module, torch.device("cpu"), sent=loads.names)
        loads.run()
        module.eval()


@torch.no_grad()
def free_weights(module: nn.Module) -> None:
    """Free the memory of all weights and buffers; they have no elements afterwards, also if they were on meta."""
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False):
            shape = parameter.shape
            if parameter.is_meta:
                empty = torch.empty(0, dtype=parameter.dtype)
                parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                inner.register_parameter(name, parameter)
            else:
                parameter.data = parameter.new_empty(0)
            setattr(parameter, _SHAPE, shape)
        for name, buffer in inner.named_buffers(recurse=False):
            if buffer.is_meta:
                inner.register_buffer(name, torch.empty(0, dtype=buffer.dtype))
            else:
                buffer.data = buffer.new_empty(0)


def freed_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights that `free_weights` has freed; none inside `whole_shapes`."""
    return [x for x in module.parameters() if hasattr(x, _SHAPE) and not x.numel()]


@contextmanager
def whole_shapes(module: nn.Module) -> Iterator[None]:
    """Give freed weights their shapes inside the context, for code that reads shapes. All elements share memory."""
    freed = freed_weights(module)
    for x in freed:
        x.data = x.new_zeros(()).expand(getattr(x, _SHAPE))
    try:
        yield
    finally:
        for x in freed:
            x.data = x.new_empty(0)


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, *, sent: Set[str] = frozenset()) -> None:
    """Allocate tensors on the meta device. `reset_parameters()` initialises them; without it they are NaN until loaded.

    Args:
        module: module with or without parameters and buffers on the meta device.
        device: device of the new storage.
        sent: names of tensors that are loaded, or sent by another rank, next. A module that lacks only these is not
            initialised.
    """

    def stored(x: Tensor) -> Tensor:
        return torch.empty_like(x, device=device) if x.is_meta else x

    unsent, tied = [], dict[nn.Parameter, nn.Parameter | None]()
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
            unsent.append(inner)
    unset = {class_of(inner).__name__ for inner in unsent if not _reset(inner)}
    if unset:
        rank_zero_warn(
            "Parameter initialization incomplete: modules that don't define a `reset_parameters()` method for "
            f"re-initialization: {', '.join(sorted(unset))}. Their weights are NaN until a checkpoint is loaded."
        )


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))


def _reset(module: nn.Module) -> bool:
    """Call `reset_parameters()` if it exists. Returns: whether it does."""
    reset: Any = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    return callable(reset)
