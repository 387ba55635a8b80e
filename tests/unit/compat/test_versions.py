"""The tested versions that errors name are those of pyproject.toml and constraints.txt."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from lightning_cp.compat.versions import TESTED

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")] + [0] * (3 - version.count(".") - 1)


@pytest.mark.parametrize("package", ["torch", "lightning", "diffusers"])
def test_the_oldest_tested_version_is_the_oldest_that_can_be_installed(package: str) -> None:
    (oldest,) = (found[1] for line in PROJECT["dependencies"] if (found := re.match(rf"{package}>=([\d.]+)", line)))
    assert _number(oldest) == _number(TESTED[package][0])


@pytest.mark.parametrize("package", TESTED)
def test_the_version_of_the_constraints_is_in_the_tested_range(package: str) -> None:
    oldest, newest = map(_number, TESTED[package])
    assert oldest <= _number(CONSTRAINTS[package]) <= newest
