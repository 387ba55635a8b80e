"""The library imports core dependencies only; the packages of the extra `recipes` are for `recipes`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from tests.unit.imported import imported_modules

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
# What users install only to use the part that imports it.
OPTIONAL = {
    "attention/merge_triton.py": {"triton"},
    "export.py": {"peft"},
    "finetune/families/video/sound.py": {"transformers"},
    "finetune/adapters/lora.py": {"peft"},
    "finetune/media/archives.py": {"datasets"},
    "finetune/media/decoder.py": {"av"},
    "finetune/precompute/run.py": {"transformers"},
    "pipelines/components.py": {"transformers"},
}
# Imported as another name than their distribution's, or required by a core dependency (diffusers, lightning).
BROUGHT_ALONG = {"PIL", "huggingface_hub", "lightning_utilities", "torchmetrics", "tqdm", "typing_extensions", "yaml"}


def _imported() -> set[tuple[str, str]]:
    """(file of the package, top-level package that it imports)."""
    return {(path.as_posix(), module.partition(".")[0]) for path, _, module in imported_modules()}


def test_the_library_imports_core_dependencies_only() -> None:
    core = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in PROJECT["dependencies"]}  # type: ignore[index]
    allowed = core | BROUGHT_ALONG | set(sys.stdlib_module_names) | {"lightning_cp"}
    library = sorted(edge for edge in _imported() if not edge[0].startswith("recipes/"))
    wrong = [f"{path}: {name}" for path, name in library if name not in allowed | OPTIONAL.get(path, set())]
    assert not wrong, "\n".join(wrong)


def test_the_exceptions_are_still_needed() -> None:
    library = {edge for edge in _imported() if not edge[0].startswith("recipes/")}
    assert {(path, name) for path, names in OPTIONAL.items() for name in names} <= library
    assert {name for _, name in library} >= BROUGHT_ALONG
