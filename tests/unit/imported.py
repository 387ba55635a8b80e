"""Imports of the package, read from its source: used by the tests of layers and of dependencies."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning_cp

PACKAGE = Path(lightning_cp.__file__).parent
RECIPES = PACKAGE.parent / "recipes"  # in a wheel, lightning_cp.recipes


@cache
def source_files() -> dict[Path, Path]:
    """Return all Python files of the package and of the recipes: path in a wheel, relative to the package -> file."""
    folders = {PACKAGE: Path(), RECIPES: Path("recipes")}
    return {start / file.relative_to(x): file for x, start in folders.items() for file in sorted(x.rglob("*.py"))}


@cache
def imported_modules() -> tuple[tuple[Path, int, str], ...]:
    """Return file (relative to the package), line and full name of every module that the package imports."""
    return tuple(_imported_modules())


def _imported_modules() -> Iterator[tuple[Path, int, str]]:
    for path, file in source_files().items():
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
    names = {_module(path): _imported_names(file) for path, file in source_files().items()}
    folders = {module.rpartition(".")[0] for module in names}

    def origin(module: str, name: str) -> str:
        if f"{module}.{name}" in names:  # a module of the folder
            return f"{module}.{name}"
        passed_on = next(((x, n) for x, n in names[module] if n == name), None)
        return origin(*passed_on) if passed_on and module in folders else module

    return {module: {origin(*x) for x in found} - {module} for module, found in names.items()}


def _module(path: Path) -> str:
    parts = ("lightning_cp", *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_names(file: Path) -> set[tuple[str, str]]:
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lightning_cp"
        for alias in node.names
        if node.module
    }
