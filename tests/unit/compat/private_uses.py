"""Private names of other packages in the source of lightning_cp, read from its syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning_cp

PACKAGE = Path(lightning_cp.__file__).parent
RECIPES = PACKAGE.parent / "recipes"
FOREIGN = ("torch", "diffusers", "lightning", "accelerate")
_OF_PYTHON_FUNCTIONS = ("__func__", "__code__", "__globals__", "__closure__", "__defaults__", "__wrapped__")
_DOTTED = re.compile(rf"({'|'.join(FOREIGN)})(\.\w+)*\._\w+(\.\w+)*")


def is_private(name: str) -> bool:
    """Return True for a name with a leading underscore that is not a special name of Python."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def _is_internal(name: str) -> bool:
    """Return True for a private name, and for what only functions written in Python have."""
    return is_private(name) or name in _OF_PYTHON_FUNCTIONS


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """Return the path and the syntax tree of every file of the package outside of `compat`, and of every recipe."""
    return tuple(_sources())


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in (PACKAGE, RECIPES):
        for file in sorted(folder.rglob("*.py")):
            path = file.relative_to(PACKAGE.parent)
            if path.parts[1] != "compat":
                yield path.as_posix(), ast.parse(file.read_text())


@cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes: several rules go through them."""
    return tuple(ast.walk(tree))


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of each private name of a package in `FOREIGN`.

    Found are imports, attribute chains on imported modules and classes (`torch._C.x`, `nn.Module._apply`), or on a
    variable that is such a chain, `getattr` on these, and texts that are such a name ("torch._dynamo"). A method's
    `__func__` and a function's `__code__` count as private: a later version may write the function in C.
    """
    names: dict[str, str] = {}
    for node in nodes_of(tree):
        for name, full in _imported(node):
            if full.split(".")[0] in FOREIGN:
                names[name] = full
                if any(map(is_private, full.split("."))):
                    yield node.lineno, full  # type: ignore[attr-defined]
    for node in nodes_of(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            full = _full_name(node.value, names)
            if full is not None:
                names.setdefault(node.targets[0].id, full)
    documentation = set(_docstrings(tree))
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in documentation and _DOTTED.fullmatch(node.value):
                yield node.lineno, node.value
        elif isinstance(node, (ast.Attribute, ast.Call)):
            full = _full_name(node, names)
            if full is not None and _is_internal(full.split(".")[-1]):
                yield node.lineno, full


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that an import binds, with the full names of what they are bound to."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0], alias.name.split(".")[0])
            if any(map(is_private, alias.name.split("."))):
                yield alias.name, alias.name
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _full_name(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return the full name of an attribute chain, or of `getattr(chain, "name")`; None if no import begins it."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        found = _full_name(node.value, names)
        return None if found is None else f"{found}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        found, name = _full_name(node.args[0], names), node.args[1]
        if found is not None and isinstance(name, ast.Constant):
            return f"{found}.{name.value}"
    return None


def _docstrings(tree: ast.Module) -> Iterator[int]:
    """Yield the ids of the nodes that are docstrings or other texts standing alone."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)
