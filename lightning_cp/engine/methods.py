"""Find the methods that a function calls on its first parameter: `self._attend(x)` in a forward."""

from __future__ import annotations

import dis
import inspect
import types
from functools import lru_cache
from typing import Any, NamedTuple

ORIGINAL = "_lightning_cp_original"  # attribute of a replacement: the processor or function that it replaces
_CALLS = ("forward", "__call__")
_DEPTH = 3  # how far methods that call other methods are followed
_SUPER = "super()."  # prefix of a name that is looked up in the parent classes


class Method(NamedTuple):
    """A function that other code finds as an attribute of an object.

    Attributes:
        stored: the attribute as stored: a function, a staticmethod, a classmethod or a bound method.
        of_class: True if a class stores it, False if the instance does.
    """

    name: str
    stored: Any
    of_class: bool

    @property
    def function(self) -> Any:
        """Return the plain function."""
        return getattr(self.stored, "__func__", self.stored)

    def with_function(self, function: Any) -> Any:
        """Wrap another function in the form in which this attribute is stored: a bound method, a staticmethod, ..."""
        if isinstance(self.stored, (staticmethod, classmethod)):
            return type(self.stored)(function)
        if self.of_class and isinstance(self.stored, types.BuiltinFunctionType):  # never bound
            return staticmethod(function)
        if isinstance(self.stored, types.MethodType):
            return types.MethodType(function, self.stored.__self__)
        return function


class Called(NamedTuple):
    """Functions that a function calls on its first parameter, directly or through these functions.

    Attributes:
        methods: by name.
        of_parents: methods of parent classes that are called by super(), with their names.
    """

    methods: dict[str, Method]
    of_parents: list[tuple[str, types.FunctionType]]


def called_on_first(owner: object, function: object) -> Called:
    """Find the methods of `owner` that a function calls on its first parameter.

    `forward` and `__call__` are left out, as are functions of torch, of the engine, and replacements by the engine.

    Args: owner: an object or a class. function: the function that gets `owner` as its first argument.
    """
    called, left = Called({}, []), [(function, 0)]
    while left:
        caller, depth = left.pop()
        if depth > _DEPTH:
            continue
        for name in _names_on_first(caller):
            parents = name.startswith(_SUPER)
            method = _of_parent(owner, caller, name.removeprefix(_SUPER)) if parents else _lookup(owner, name)
            if method is None or method.name in called.methods or (not parents and name in _CALLS):
                continue
            if not parents:
                called.methods[name] = method
            elif isinstance(method.stored, types.FunctionType):
                called.of_parents.append((method.name, method.stored))
            if not isinstance(method.stored, staticmethod):
                left.append((method.function, depth + 1))
    return called


def attributes_read(owner: object, function: object) -> list[str]:
    """List the attributes that a function, and the methods that it calls on its first parameter, read from it."""
    methods = called_on_first(owner, function).methods.values()
    functions = [function, *(x.function for x in methods if not isinstance(x.stored, staticmethod))]
    names = dict.fromkeys(name for x in functions for name in _names_on_first(x))
    return [name for name in names if not name.startswith(_SUPER)]


def _of_parent(owner: object, caller: object, name: str) -> Method | None:
    """Find the method that `super()` in a function finds."""
    order = (owner if isinstance(owner, type) else type(owner)).__mro__
    inner = inspect.unwrap(caller) if callable(caller) else caller
    defining = (i for i, base in enumerate(order) if _contains(vars(base).values(), inner))
    found = next((x for x in order[next(defining, 0) + 1 :] if name in vars(x)), None)
    return None if found is None else _lookup(found, name)


def _contains(values: Any, function: object) -> bool:
    return any(isinstance(x, types.FunctionType) and inspect.unwrap(x) is function for x in values)


def _lookup(owner: object, name: str) -> Method | None:
    """Find a method or function that an object or its class stores under a name; None if it stores anything else."""
    own = {} if isinstance(owner, type) else getattr(owner, "__dict__", {})
    of_class = name not in own
    kind = owner if isinstance(owner, type) else type(owner)
    stored = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None) if of_class else own[name]
    if isinstance(stored, types.BuiltinFunctionType):
        return Method(name, stored, of_class)
    method = Method(name, stored, of_class)
    function = method.function
    if not isinstance(function, types.FunctionType) or ORIGINAL in function.__dict__:
        return None
    origin = f"{function.__module__ or ''}."
    return None if origin.startswith(("torch.", "lightning_cp.engine.")) else method


def _names_on_first(function: object) -> list[str]:
    """List attributes that a function, also inside decorators, reads from its first parameter or from super()."""
    names: dict[str, None] = {}
    for x in {id(x): x for x in (function, inspect.unwrap(function) if callable(function) else function)}.values():
        code = getattr(x, "__code__", None)
        if isinstance(code, types.CodeType) and code.co_argcount:
            names |= dict.fromkeys(_attributes(code, code.co_varnames[0]))
    return list(names)


@lru_cache(maxsize=4096)
def _attributes(code: types.CodeType, first: str) -> tuple[str, ...]:
    """List attributes that code reads from the variable `first`, or from super(), then with the prefix `_SUPER`."""
    names, on_first, on_super = [], False, False
    for step in dis.get_instructions(code):
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")):
            loaded = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
            on_first = loaded == first
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval == "super":
            on_super, on_first = True, False
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            if on_super or step.opname == "LOAD_SUPER_ATTR":
                names.append(_SUPER + step.argval)
            elif on_first:
                names.append(step.argval)
            on_first = on_super = False
        elif step.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "RESUME"):
            on_first = False
    nested = [name for x in code.co_consts if isinstance(x, types.CodeType) for name in _attributes(x, first)]
    return tuple(dict.fromkeys([*names, *nested]))
