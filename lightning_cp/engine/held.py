"""Find objects and functions that modules and processors keep in attributes and may call: helpers, partials, tables.

The engine replaces the code of modules and processors, but not theirs. They are watched for changes, and checked for
attention calls (see `bypass`).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.engine.methods import attributes_read
from lightning_cp.engine.rebinding import makes_attention_call

Attribute = tuple[dict[Any, Any], Any, object]  # the attributes of an object, or a table; name; value

_DEPTH = 2  # how far objects inside objects are followed
_DATA = (bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, types.ModuleType, type)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
_LIBRARIES = ("torch.", "lightning_cp.", "accelerate.", "peft.", "diffusers.hooks.", "builtins.", "collections.")


def held_by(owner: Any, function: object) -> Iterator[Attribute]:
    """Yield each attribute that an object's code reads and that may hold code, followed by the attributes inside it.

    An attribute that is missing or None is included, because code may be put there. Numbers, tensors and registered
    modules are not; processors are owners themselves.

    Args: owner: a module or a processor. function: its own forward or `__call__`.
    """
    registered = {name for kind in ("_modules", "_parameters", "_buffers") for name in owner.__dict__.get(kind, ())}
    for name in attributes_read(owner, function):
        if name in registered or name == "processor" or (name not in owner.__dict__ and hasattr(type(owner), name)):
            continue
        yield from _inside(owner.__dict__, name, _DEPTH)


def lists_in(attributes: list[Attribute]) -> Iterator[list[Any]]:
    """Yield the lists among the values, which can change in place."""
    yield from (value for _, _, value in attributes if isinstance(value, list))


def helpers_in(attributes: list[Attribute]) -> Iterator[object]:
    """Yield the values, and the items of lists and tuples, that are objects of a user's class."""
    for _, _, value in attributes:
        yield from (x for x in (value if isinstance(value, (list, tuple)) else (value,)) if _is_helper(x))


def functions_of(kind: type) -> Iterator[tuple[type, str, object]]:
    """Yield the class, name and function of each method that a user's class defines."""
    yield from (
        (kind, name, getattr(kind, name)) for name, x in vars(kind).items() if isinstance(x, types.FunctionType)
    )


def hidden_in(owner: Any, attributes: list[Attribute]) -> str | None:
    """Return the name of an attribute with attention calls that are not replaced; None if there is none.

    Args: attributes: those of `held_by(owner, ...)`. Functions directly in an attribute of the owner are replaced.
    """
    for where, name, value in attributes:
        is_replaced = where is owner.__dict__ and isinstance(value, (types.FunctionType, types.MethodType))
        if not is_replaced and attends_when_called(value):
            return str(name)
    return None


def attends_when_called(value: object) -> bool:
    """Return True if a function, a partial, a method of an object, or an item of a list, makes attention calls."""
    if isinstance(value, (list, tuple)):
        return any(map(attends_when_called, value))
    if isinstance(value, partial):
        return attends_when_called(value.func)
    if value is F.scaled_dot_product_attention:
        return True
    if _is_helper(value):
        return any(makes_attention_call(function) for _, _, function in functions_of(type(value)))
    return makes_attention_call(getattr(value, "__func__", value))


def _inside(attributes: dict[Any, Any], name: Any, depth: int) -> Iterator[Attribute]:
    value = attributes.get(name)
    if _is_data(value):
        return
    yield attributes, name, value
    if depth == 0:
        return
    if isinstance(value, dict):
        inner: dict[Any, Any] = value
    elif _is_helper(value):
        inner = value.__dict__
    else:
        return
    for key in inner:
        if inner[key] is not None:
            yield from _inside(inner, key, depth - 1)


def _is_data(value: object) -> bool:
    """Return True for numbers, tensors and others that hold no code, and for lists and tuples of them."""
    if isinstance(value, (list, tuple)):
        return all(x is None or _is_data(x) for x in value)
    return isinstance(value, _DATA)


def _is_helper(value: Any) -> bool:
    """Return True for objects of classes that a user may have written; modules are included."""
    if isinstance(value, (*_DATA, *_CODE)) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return not f"{type(value).__module__}.".startswith(_LIBRARIES)
