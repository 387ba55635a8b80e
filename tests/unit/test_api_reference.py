"""docs/api*.md have an entry for every name of the public modules, and mkdocs builds the pages without a warning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import lightning.pytorch  # noqa: F401  # at collection: its first import sets an environment variable
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("api*.md"))
API = "\n".join(page.read_text() for page in PAGES)
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
        assert documented & {*ENTRIES, *re.findall(r"`(lightning_cp\.\w+)`", API)}, f"docs/api*.md lack {module}.{name}"


def test_the_public_modules_have_a_heading() -> None:
    least = "callbacks data errors export fabric families objectives pipelines plans pytorch sampling training vae"
    assert {"lightning_cp", *(f"lightning_cp.{name}" for name in least.split())} <= set(PUBLIC)


def test_every_entry_exists() -> None:
    assert len(ENTRIES) == len(set(ENTRIES)) > 90
    for entry in ENTRIES:
        module, _, name = entry.rpartition(".")
        assert hasattr(import_module(module), name), entry


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site: `--strict`, which `--quiet` would turn off, finds links that lead nowhere."""
    pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.full
def test_the_reference_is_built_without_a_warning(site: Path) -> None:
    assert "Context parallelism for diffusion" in (site / "index.html").read_text(), "README is the home page"
    built = "".join((site / page.stem / "index.html").read_text() for page in PAGES)
    missing = [entry for entry in ENTRIES if f'id="{entry}"' not in built]
    assert not missing, f"without a docstring: {missing}"


@pytest.mark.full
def test_pages_load_nothing_from_another_host(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*"
        r"|<link\b(?![^>]*\brel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^>]*"
        r"|(?:url\(|@import\s)[\"']?(?:https?:)?//[^)]*"
    )
    assert loaded.search('<link href="https://fonts.example/css" rel="stylesheet">')
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(pages) > 24
    found = {str(path.relative_to(site)): loaded.findall(path.read_text()) for path in pages}
    assert not {name: urls for name, urls in found.items() if urls}


@pytest.mark.full
def test_the_search_finds_a_word_in_the_title_where_it_is_explained(site: Path) -> None:
    sections = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    titles = [section["title"] for section in sections if section["location"].startswith("start_lora/")]
    assert any("LoRA" in title for title in titles), titles
