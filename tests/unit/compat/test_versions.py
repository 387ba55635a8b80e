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


def _bounds(package: str) -> tuple[str, str]:
    """The oldest and the newest version that pyproject.toml allows."""
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["recipes"]]
    (bounds,) = (x.groups() for line in lines if (x := re.match(rf"{package}>=([\d.]+).*,<=([\d.]+)", line)))
    return bounds


@pytest.mark.parametrize("package", ["torch", "lightning", "diffusers"])
def test_the_tested_versions_are_those_that_can_be_installed(package: str) -> None:
    assert list(map(_number, _bounds(package))) == list(map(_number, TESTED[package]))


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_only_versions_that_were_tested_can_be_installed(package: str) -> None:
    oldest, newest = map(_number, _bounds(package))
    assert oldest <= _number(CONSTRAINTS[package]) <= newest


@pytest.mark.parametrize("package", TESTED)
def test_the_version_of_the_constraints_is_in_the_tested_range(package: str) -> None:
    oldest, newest = map(_number, TESTED[package])
    assert oldest <= _number(CONSTRAINTS[package]) <= newest
