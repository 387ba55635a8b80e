"""Links in README, CONTRIBUTING and docs lead to existing files and headings, and the source files they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = (ROOT, ROOT / "lightning_cp", ROOT / "tests/e2e")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name) if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}: {sorted(anchors(linked))}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_named_source_files_exist(page: str) -> None:
    for name in re.findall(r"`([a-z_]\w*(?:/\w+)*(?:\.py|\.yaml|/))`", (ROOT / page).read_text()):
        there = any((folder / name).exists() for folder in FOLDERS) or any((ROOT / "lightning_cp").rglob(name))
        assert there, f"{page} names {name}"


def test_the_architecture_names_every_folder_and_module() -> None:
    named = set(re.findall(r"`(\w+?)(?:\.py|/)?`", (ROOT / "docs/architecture.md").read_text()))
    package = ROOT / "lightning_cp"
    there = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__", "_register"} <= named
