"""docs/api.md has an entry for every name of the public modules, and mkdocs builds the pages without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import lightning.pytorch  # noqa: F401  # at collection: its first import sets an environment variable
import pytest

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "api.md").read_text()
ENTRIES = re.findall(r"^::: (\S+)$", API, re.MULTILINE)
PUBLIC = re.findall(r"^## (lightning_cp\S*)$", API, re.MULTILINE)


def public_names(module: str) -> list[str]:
    """Return `__all__` of a module, or the classes and functions that it defines."""
    loaded = import_module(module)
    made = [name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == module]
    return list(getattr(loaded, "__all__", [name for name in made if not name.startswith("_")]))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_entry(module: str) -> None:
    names = public_names(module)
    assert names
    for name in names:
        documented = {f"{module}.{name}", f"lightning_cp.{name}"}  # pipelines has two names of the package's own
        assert documented & {*ENTRIES, *re.findall(r"`(lightning_cp\.\w+)`", API)}, f"docs/api.md lacks {module}.{name}"


def test_the_public_modules_have_a_heading() -> None:
    least = "callbacks data errors export fabric families objectives pipelines plans pytorch sampling training vae"
    assert {"lightning_cp", *(f"lightning_cp.{name}" for name in least.split())} <= set(PUBLIC)


def test_every_entry_exists() -> None:
    assert len(ENTRIES) == len(set(ENTRIES)) > 90
    for entry in ENTRIES:
        module, _, name = entry.rpartition(".")
        assert hasattr(import_module(module), name), entry


@pytest.mark.full
def test_the_reference_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "Context parallelism for diffusion" in (tmp_path / "index.html").read_text(), "README is the home page"
    page = (tmp_path / "api" / "index.html").read_text()
    missing = [entry for entry in ENTRIES if f'id="{entry}"' not in page]
    assert not missing, f"without a docstring: {missing}"
