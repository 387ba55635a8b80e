"""Imports of the package, read from its source: used by the tests of layers and of dependencies."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning_cp

PACKAGE = Path(lightning_cp.__file__).parent


@cache
def imported_modules() -> tuple[tuple[Path, int, str], ...]:
    """Return file (relative to the package), line and full name of every module that the package imports."""
    return tuple(_imported_modules())


def _imported_modules() -> Iterator[tuple[Path, int, str]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: relative imports hide the layer"
                nested = node.module == "lightning_cp"
                modules = [f"{node.module}.{alias.name}" if nested else node.module or "" for alias in node.names]
            else:
                continue
            yield from ((path, node.lineno, module) for module in modules)


def imported_files() -> dict[str, set[str]]:
    """Return the modules of the package whose names each module imports, also inside of functions.

    A name that a folder's `__init__` passes on counts as one of the module that defines it.
    """
    names = {_module(file): _imported_names(file) for file in PACKAGE.rglob("*.py")}

    def origin(module: str, name: str) -> str:
        if f"{module}.{name}" in names:  # a module of the folder
            return f"{module}.{name}"
        passed_on = next(((x, n) for x, n in names[module] if n == name), None)
        return origin(*passed_on) if passed_on and (PACKAGE.parent / module.replace(".", "/")).is_dir() else module

    return {module: {origin(*x) for x in found} - {module} for module, found in names.items()}


def _module(file: Path) -> str:
    parts = ("lightning_cp", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_names(file: Path) -> set[tuple[str, str]]:
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lightning_cp"
        for alias in node.names
        if node.module
    }
