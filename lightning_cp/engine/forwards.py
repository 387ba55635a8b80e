"""Find and replace the forward of one module instance, inside the wrappers of diffusers and accelerate.

Both libraries replace `module.forward` by a wrapper (offloading, layerwise casting, caches, skipped layers), before or
after the engine, and remove it at any time. The engine replaces the function that such wrappers call, so any order
works.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lightning_cp.compat.torch_names import DropoutModule

Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class ForwardSlot:
    """An attribute of an object: a module's `forward`, or a wrapper's attribute for the function it calls."""

    holder: Any
    name: str

    def get(self) -> Function | None:
        """Return the function stored there; None if the instance has none, and the class's forward runs."""
        function: Function | None = self.holder.__dict__.get(self.name)
        return function

    def put(self, function: Function) -> None:
        """Store another function there."""
        self.holder.__dict__[self.name] = function

    def clear(self, module: nn.Module) -> None:
        """Restore the forward of the module's class."""
        if self.holder is module and self.name == "forward":
            self.holder.__dict__.pop(self.name, None)
        else:  # a wrapper needs a function here: it calls the attribute
            self.holder.__dict__[self.name] = types.MethodType(type(module).forward, module)


class ForwardWrapper:
    """Base class of the engine's wrapper of a model's forward. The forward is then `partial(function, wrapper)`.

    Attributes:
        original: the wrapped forward; None: the forward of the module's class.
    """

    original: Function | None


def own_forward(module: nn.Module, *, above: ForwardWrapper | None = None) -> ForwardSlot:
    """Find the attribute with a module's own forward, inside all wrappers (of diffusers, accelerate and the engine).

    Args: above: do not look inside this wrapper.
    """
    slot = ForwardSlot(module, "forward")
    while True:
        function = slot.get()
        inner = _wrapped_slot(module, function)
        if inner is None or (above is not None and inner.holder is above):
            return slot
        slot = inner


def own_function(module: nn.Module) -> Function:
    """Return a module's own forward as a plain function: the class's, or one that was set on the instance."""
    forward = own_forward(module).get()
    return type(module).forward if forward is None or _is_of_class(module, forward) else unbound(forward)


def decorated_function(module: nn.Module) -> Function | None:
    """Return a module's own forward without `functools.wraps` decorators; None if it is the forward of its class."""
    forward = own_forward(module).get()
    inner = None if forward is None else inspect.unwrap(forward)
    return None if inner is None or _is_of_class(module, inner) else inner


def unbound(function: Function) -> Function:
    """Return the function of a bound method; return other callables unchanged."""
    return function.__func__ if isinstance(function, types.MethodType) else function


def _is_of_class(module: nn.Module, function: Function) -> bool:
    forward = type(module).forward
    return unbound(function) in (forward, inspect.unwrap(forward))


def _wrapped_slot(module: nn.Module, function: Any) -> ForwardSlot | None:
    """Find the attribute in which a wrapper stores the forward it calls; None if the function is no known wrapper."""
    if not isinstance(function, partial):
        return None
    if function.args and isinstance(function.args[0], ForwardWrapper):
        return ForwardSlot(function.args[0], "original")
    origin = getattr(function.func, "__module__", None) or ""
    if origin.startswith("accelerate.") and "_old_forward" in module.__dict__:
        return ForwardSlot(module, "_old_forward")
    if origin.startswith("diffusers.hooks"):
        reference: Any = inspect.getclosurevars(function.func).nonlocals.get("function_reference")
        known = getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", ())
        if any(x is reference for x in known):  # false in a deep copy: its wrappers call the original model's forward
            name = "forward" if reference.original_forward is None else "original_forward"
            return ForwardSlot(reference, name)
    return None


def has_dropout(module: nn.Module) -> bool:
    """Return True if a dropout module inside of `module` draws random numbers in its forward."""
    return any(isinstance(x, DropoutModule) and x.training and x.p > 0 for x in module.modules())
