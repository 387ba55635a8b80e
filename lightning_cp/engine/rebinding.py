"""Replace the attention and dropout calls of a function: the same code with other globals.

Code finds `dispatch_attention_fn`, `F.scaled_dot_product_attention` and `F.dropout` in the globals of its module. The
engine runs a copy of the function that has other globals. Nothing global is patched, so other models and other threads
are not affected, and compilers see plain functions.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lightning_cp.engine.methods import ORIGINAL, Method, called_on_first

OF_CLASS = "_lightning_cp_of_class"  # attribute of a replaced forward: True if the original belongs to the class
SDPA = "scaled_dot_product_attention"
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_FLEX = "torch.nn.attention.flex_attention"
_DEPTH = 3  # how far helper functions are followed

Replacements = dict[str, Callable[..., Any]]  # by name: dispatch_attention_fn, or functions of torch.nn.functional


def rebind(function: types.FunctionType, replacements: Replacements, depth: int = _DEPTH) -> types.FunctionType | None:
    """Return a copy of `function` with replaced calls, also in its helpers; None if there are no such calls."""
    changed: dict[str, Any] = {}
    names = set(_names(function.__code__))
    named = {name: x for name, x in replacements.items() if name in names}
    if not named.keys().isdisjoint(DROPOUTS):  # `self.dropout(x)` has such a name too
        called = set(_called(function.__code__, function.__globals__))
        named = {name: x for name, x in named.items() if name not in DROPOUTS or name in called}
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        replaced = _replace(value, named, replacements, depth)
        if replaced is not None:
            changed[name] = replaced
    cells = {
        i: x for i, cell in enumerate(function.__closure__ or ()) if (x := _in_cell(cell, named, replacements, depth))
    }
    if not changed and not cells:
        return None
    # Without __name__: a compiler would otherwise look the globals up in the module of that name.
    scope = {name: value for name, value in function.__globals__.items() if name != "__name__"} | changed
    closure = function.__closure__
    if cells and closure is not None:
        closure = tuple(types.CellType(cells[i]) if i in cells else cell for i, cell in enumerate(closure))
    bound = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def _in_cell(cell: types.CellType, named: Replacements, replacements: Replacements, depth: int) -> object:
    """Return the replacement of a function in a closure (such as a decorator's); None to keep it."""
    try:
        value = cell.cell_contents
    except ValueError:  # empty
        return None
    return _replace(value, named, replacements, depth)


def _replace(value: Any, named: Replacements, replacements: Replacements, depth: int) -> object:
    """Return the replacement of one global of a function; None to keep the global.

    Args: named: the replacements with names that occur in the function itself.
    """
    if isinstance(value, types.ModuleType) and value in (torch, nn, F):
        functions = {name: x for name, x in named.items() if name in _FUNCTIONS}
        return _module_with(value, functions) if functions else None
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return None
    for name, x in replacements.items():
        if value in (_FUNCTIONS.get(name), _IN_TORCH.get(name)):
            return x
    if not isinstance(value, types.FunctionType):
        return None
    if value.__name__ == "dispatch_attention_fn" and value.__module__.startswith("diffusers."):
        return replacements.get("dispatch_attention_fn")
    return rebind(value, replacements, depth - 1) if depth and not is_foreign(value) else None


def is_foreign(function: types.FunctionType) -> bool:
    """Return True if torch or this engine defines a function: its code is not changed."""
    return f"{function.__module__ or ''}.".startswith(("torch.", "lightning_cp.engine."))


def rebind_methods(
    owner: object, function: object, replacements: Replacements, made: dict[object, Any] | None = None
) -> dict[str, tuple[Method, Any]]:
    """Replace the calls in methods that a function calls on its first parameter.

    Args:
        owner: the object, or the class, that has the methods.
        made: replacements made so far, by function; those of this call are added.
    Returns: each method with such calls, and what is to be stored in its place (a function, a staticmethod, ...).
    """
    made = {} if made is None else made
    found = {}
    for name, method in called_on_first(owner, function).methods.items():
        if method.function not in made:
            replaced = _replace(method.function, {}, replacements, _DEPTH)
            if isinstance(replaced, types.FunctionType) and replaced not in replacements.values():
                replaced.__dict__[ORIGINAL] = method.function
            made[method.function] = replaced
        if made[method.function] is not None:
            found[name] = method, method.with_function(made[method.function])
    return found


_FUNCTIONS: Replacements = {name: getattr(F, name) for name in (SDPA, *DROPOUTS)}
_IN_TORCH: Replacements = {name: getattr(torch, name) for name in DROPOUTS if hasattr(torch, name)}


def _module_with(module: types.ModuleType, functions: Replacements) -> types.ModuleType:
    """Return a copy of torch, torch.nn or torch.nn.functional with these functions in place of its own."""
    functional = types.ModuleType(F.__name__)
    functional.__dict__.update(F.__dict__, **functions)
    if module is F:
        return functional
    modules = types.ModuleType(nn.__name__)
    modules.__dict__.update(nn.__dict__, functional=functional)
    if module is nn:
        return modules
    whole = types.ModuleType(torch.__name__)
    whole.__dict__.update(torch.__dict__, nn=modules)
    whole.__dict__.update({name: x for name, x in functions.items() if name in _IN_TORCH})
    return whole


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _called(code: types.CodeType, scope: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the dropout functions that code reads from its globals (`dropout`, `F.dropout`)."""
    value: Any = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = scope.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
            value = getattr(value, step.argval, None)
        elif step.opname not in ("CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG"):
            value = None
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            yield from (name for name in DROPOUTS if value in (_FUNCTIONS[name], _IN_TORCH.get(name)))
            value = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _called(constant, scope)


def attending_method(thing: object) -> str | None:
    """Return the name of the method of a class or object that makes attention calls; None if there is none."""
    kind = thing if isinstance(thing, type) else type(thing)
    calls = ((name, getattr(kind, name, None)) for name in ("__call__", "forward"))
    return next((name for name, function in calls if makes_attention_call(function, thing)), None)


def makes_attention_call(function: object, owner: object = None) -> bool:
    """Return True if a function makes attention calls that can be replaced, itself or in methods of `owner`.

    Args: owner: the object, or the class, that the function gets as its first argument; None: do not look at methods.
    """
    if not isinstance(function, types.FunctionType) or is_foreign(function):
        return False
    return rebind(function, _TRIAL) is not None or (owner is not None and bool(rebind_methods(owner, function, _TRIAL)))


def attention_by_super(function: object, owner: object) -> str | None:
    """Return the name of a method that attends and is called by super(), where calls cannot be replaced; or None.

    Args: function, owner: see `makes_attention_call`.
    """
    if not isinstance(function, types.FunctionType) or is_foreign(function):
        return None
    parents = called_on_first(owner, function).of_parents
    return next((name for name, found in parents if makes_attention_call(found)), None)


def calls_flex_attention(function: object, depth: int = _DEPTH) -> bool:
    """Return True if a function, or a helper that it calls, calls torch's `flex_attention`, compiled or not."""
    if not isinstance(function, types.FunctionType) or is_foreign(function):
        return False
    names = set(_names(function.__code__))
    if _FLEX in names or {"torch", "attention", "flex_attention"} <= names:  # imported in the function, or by its path
        return True
    used = [function.__globals__[name] for name in names & function.__globals__.keys()]
    if any(_is_flex_attention(value, names) for value in used):
        return True
    helpers = [value for value in used if getattr(value, "__name__", "") != "dispatch_attention_fn"]
    return depth > 0 and any(calls_flex_attention(helper, depth - 1) for helper in helpers)


def _is_flex_attention(value: object, names: set[str]) -> bool:
    """Return True for torch's function, a compiled one, and its module if the code also has the function's name."""
    if isinstance(value, types.ModuleType):
        return value.__name__ == _FLEX and "flex_attention" in names
    return (getattr(value, "__module__", None), getattr(value, "__name__", None)) == (_FLEX, "flex_attention")


def _nothing(*_: object, **__: object) -> None:
    raise AssertionError("a trial replacement is never called")


_TRIAL: Replacements = {"dispatch_attention_fn": _nothing, SDPA: _nothing}
