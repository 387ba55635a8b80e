"""The library imports core dependencies only; the packages of the extra `recipes` are for `lightning_cp/app`."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import lightning_cp

PACKAGE = Path(lightning_cp.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
# What users install only to use the part that imports it.
OPTIONAL = {
    "attention/merge_triton.py": {"triton"},
    "checkpoint/export.py": {"peft"},
}
# Imported as another name than their distribution's, or required by a core dependency.
BROUGHT_ALONG = {"hydra", "PIL", "lightning_utilities", "typing_extensions", "yaml", "torchmetrics", "huggingface_hub"}


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_the_library_imports_core_dependencies_only() -> None:
    core = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in PROJECT["dependencies"]}  # type: ignore[index]
    allowed = core | BROUGHT_ALONG | set(sys.stdlib_module_names) | {"lightning_cp"}
    wrong = [
        f"{path}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if (path := file.relative_to(PACKAGE).as_posix()).partition("/")[0] != "app"
        for name in _imported(file)
        if name not in allowed | OPTIONAL.get(path, set())
    ]
    assert not wrong, "\n".join(wrong)


def test_the_exceptions_are_still_needed() -> None:
    for path, names in OPTIONAL.items():
        assert names & set(_imported(PACKAGE / path)), path
