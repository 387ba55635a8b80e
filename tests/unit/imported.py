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
