"""The forward of one module instance, beneath the wrappers that diffusers and accelerate put around it.

Both libraries replace `module.forward` by a wrapper (offloading, layerwise casting, caches, skipped layers), before or
after ours, and take it off at any time. We replace the function that such wrappers call, so that any order works.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Place:
    """An attribute of an object: a module's `forward`, or where a wrapper keeps the function it calls."""

    holder: Any
    name: str

    def get(self) -> Function | None:
        """The function there; None where the instance has none, so that its class' forward runs."""
        found: Function | None = self.holder.__dict__.get(self.name)
        return found

    def put(self, function: Function) -> None:
        """Replace the function there."""
        self.holder.__dict__[self.name] = function

    def clear(self, module: nn.Module) -> None:
        """Leave the forward of the module's class there."""
        if self.holder is module and self.name == "forward":
            self.holder.__dict__.pop(self.name, None)
        else:  # a wrapper calls what it finds here
            self.holder.__dict__[self.name] = types.MethodType(type(module).forward, module)


class Around:
    """Base of what runs around a model's forward by a wrapper of ours, `partial(function, around)`.

    Attributes:
        original: the forward that is called; None for that of the module's class.
    """

    original: Function | None


def own_forward(module: nn.Module, *, above: Around | None = None) -> Place:
    """Find the place of a module's own forward, beneath all wrappers of diffusers and accelerate, and ours.

    Args: above: stop at the wrapper that runs this.
    """
    place = Place(module, "forward")
    while True:
        function = place.get()
        beneath = _beneath(module, function)
        if beneath is None or (above is not None and beneath.holder is above):
            return place
        place = beneath


def own_function(module: nn.Module) -> Function:
    """The plain function that is a module's own forward: its class', or one that was set on the instance."""
    found = own_forward(module).get()
    return type(module).forward if found is None or _is_of_class(module, found) else unbound(found)


def decorated_function(module: nn.Module) -> Function | None:
    """What a module's own forward is beneath decorators, made with `functools.wraps`; None for that of its class."""
    found = own_forward(module).get()
    beneath = None if found is None else inspect.unwrap(found)
    return None if beneath is None or _is_of_class(module, beneath) else beneath


def unbound(function: Function) -> Function:
    """The function of a bound method; anything else as it is."""
    return function.__func__ if isinstance(function, types.MethodType) else function


def _is_of_class(module: nn.Module, function: Function) -> bool:
    theirs = type(module).forward
    return unbound(function) in (theirs, inspect.unwrap(theirs))


def _beneath(module: nn.Module, function: Any) -> Place | None:
    """Where a wrapper keeps the forward that it calls; None for a function that is no wrapper of theirs."""
    if not isinstance(function, partial):
        return None
    if function.args and isinstance(function.args[0], Around):
        return Place(function.args[0], "original")
    origin = getattr(function.func, "__module__", None) or ""
    if origin.startswith("accelerate.") and "_old_forward" in module.__dict__:
        return Place(module, "_old_forward")
    if origin.startswith("diffusers.hooks"):
        reference: Any = inspect.getclosurevars(function.func).nonlocals.get("function_reference")
        known = getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", ())
        if any(x is reference for x in known):  # not so in a deep copy, whose wrappers call the original's forward
            name = "forward" if reference.original_forward is None else "original_forward"
            return Place(reference, name)
    return None
