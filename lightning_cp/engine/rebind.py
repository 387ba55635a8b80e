"""Replace the attention calls of a function: the same code with other globals."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SDPA = "scaled_dot_product_attention"
_DEPTH = 3  # how far helper functions are followed

Replacements = dict[str, Callable[..., Any]]  # by name: dispatch_attention_fn, scaled_dot_product_attention


def rebind(function: types.FunctionType, replacements: Replacements, depth: int = _DEPTH) -> types.FunctionType | None:
    """Return `function` with its attention calls replaced, in itself and in helpers it calls; None if it makes none."""
    changed: dict[str, Any] = {}
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        replaced = _replace(value, names, replacements, depth)
        if replaced is not None:
            changed[name] = replaced
    if not changed:
        return None
    # Without __name__: a compiler would otherwise look the globals up in the module of that name.
    scope = {name: value for name, value in function.__globals__.items() if name != "__name__"} | changed
    bound = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def _replace(value: Any, names: set[str], replacements: Replacements, depth: int) -> Any:
    if value is F.scaled_dot_product_attention:
        return replacements[SDPA]
    if isinstance(value, types.ModuleType) and value in (torch, nn, F):
        return _module_with(value, replacements[SDPA]) if SDPA in names else None
    if not isinstance(value, types.FunctionType):
        return None
    if value.__name__ == "dispatch_attention_fn" and value.__module__.startswith("diffusers."):
        return replacements["dispatch_attention_fn"]
    return rebind(value, replacements, depth - 1) if depth and not _of_torch(value) else None


def _of_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] == "torch"


def _module_with(module: types.ModuleType, attention: Callable[..., Any]) -> types.ModuleType:
    """Return a copy of torch, torch.nn or torch.nn.functional in which scaled_dot_product_attention is `attention`."""
    functional = types.ModuleType(F.__name__)
    functional.__dict__.update(F.__dict__, **{SDPA: attention})
    if module is F:
        return functional
    modules = types.ModuleType(nn.__name__)
    modules.__dict__.update(nn.__dict__, functional=functional)
    if module is nn:
        return modules
    whole = types.ModuleType(torch.__name__)
    whole.__dict__.update(torch.__dict__, nn=modules)
    return whole


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def attending_method(thing: object) -> str | None:
    """Return the name of the method of a class or object that makes attention calls; None if there is none."""
    kind = thing if isinstance(thing, type) else type(thing)
    return next((name for name in ("__call__", "forward") if makes_attention_call(getattr(kind, name, None))), None)


def makes_attention_call(function: object) -> bool:
    """Return True if a function makes attention calls that can be replaced."""
    nothing: Replacements = {"dispatch_attention_fn": _nothing, SDPA: _nothing}
    if not isinstance(function, types.FunctionType) or _of_torch(function):
        return False
    return rebind(function, nothing) is not None


def _nothing(*_: object, **__: object) -> None:
    raise AssertionError("a trial replacement is never called")
