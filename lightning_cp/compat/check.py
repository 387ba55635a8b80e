"""Check private attributes and methods of other packages before a feature uses them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import CodeType
from typing import Any

from lightning_cp.compat.table import TABLE, Feature, PrivateUse
from lightning_cp.compat.versions import incompatible, private_names

_CHECKED: set[PrivateUse] = set()  # found in this process: they are checked once


def check_private_uses(feature: Feature) -> None:
    """Check that all names which a feature needs exist, in the packages that are imported.

    Nothing is imported: if a module is not imported, none of its objects are in use.

    Raises: IncompatibleVersionError: a name does not exist in the installed version.
    """
    uses = [use for use in TABLE if use.feature == feature and use not in _CHECKED]
    owned = [(use, owner) for use in uses if (owner := owner_of(use)) is not None]
    check_uses(owned)
    _CHECKED.update(use for use, _ in owned)


def check_uses(uses: Iterable[tuple[PrivateUse, Any]]) -> None:
    """Check names on their owners. Raises: IncompatibleVersionError: a name does not exist."""
    missing = [use for use, owner in uses if not _has(owner, use.name)]
    if missing:
        raise incompatible(missing[0].package, "; ".join(map(str, missing)))


def owner_of(use: PrivateUse, *, load: bool = False) -> object:
    """Return the owner of a name; None if its module exists and is not imported.

    Args: load: import its module if necessary.
    Raises: IncompatibleVersionError: the installed version has no such module, class or function.
    """
    module, _, name = use.owner.partition(":")
    if load:
        with private_names(use.package):
            import_module(module)
    atoms = module.split(".")
    for end in range(1, len(atoms) + 1):
        path = ".".join(atoms[:end])
        if path in sys.modules:
            continue
        if end > 1 and find_spec(path) is None:  # its parent is imported: this imports nothing
            raise incompatible(use.package, str(use))
        return None
    module_object = sys.modules[module]
    if name and not hasattr(module_object, name):
        raise incompatible(use.package, str(use))
    return getattr(module_object, name) if name else module_object


def _has(owner: Any, name: str) -> bool:
    """Return True if an owner has an attribute, or if its code mentions it (methods set attributes of instances)."""
    if hasattr(owner, name):
        return True
    kinds = owner.__mro__ if isinstance(owner, type) else (owner,)
    return any(name in vars(kind).get("__annotations__", {}) or name in _mentioned(kind) for kind in kinds)


def _mentioned(kind: Any) -> set[str]:
    """Return the names in the code of a class or a function."""
    methods = list(vars(kind).values()) if isinstance(kind, type) else [kind]
    functions = [getattr(method, "__func__", getattr(method, "fget", None) or method) for method in methods]
    codes = [code for function in functions if isinstance(code := getattr(function, "__code__", None), CodeType)]
    return {name for code in codes for name in _names(code)}


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
