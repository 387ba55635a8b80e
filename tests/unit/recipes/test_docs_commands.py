"""The settings in the documentation's commands for recipes/train.py and recipes/sample.py exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.unit.recipes.composed import composed

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:recipes/|lightning-cp )(train|sample)(?:\.py)? ((?:[^\n`#<\[]|\[[^\]\n]*\])*)$", re.MULTILINE)


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return the recipe and the settings of each command, without Hydra's own ones and the swept ones."""
    found = []
    for recipe, line in COMMAND.findall(re.sub(r" \\\n +", " ", page.read_text(encoding="utf-8")).replace("`", "\n")):
        arguments = shlex.split(line)
        swept = "-m" in arguments and re.compile(r"hydra|.*[,(]")
        if "--config-dir" not in arguments:
            kept = [x for x in arguments if "=" in x and not (swept and swept.match(x)) and not x.startswith("hydra")]
            found.append((recipe, kept))
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
@pytest.mark.default(1)
def test_settings_of_commands_exist(page: Path) -> None:
    for recipe, settings in commands(page):
        composed(recipe, *settings)


def test_the_task_page_has_commands() -> None:
    assert len(commands(ROOT / "docs" / "finetuning.md")) >= 10
