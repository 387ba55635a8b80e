"""The tested versions that errors name are those of pyproject.toml and constraints.txt; missing packages are named."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from lightning_cp.compat.versions import TESTED, install_command, missing_package
from lightning_cp.launch.job import FailureKind
from lightning_cp.launch.rank import failure_of

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


def test_the_tested_versions_are_those_that_can_be_installed() -> None:
    for package in ("torch", "lightning", "diffusers"):
        assert list(map(_number, _bounds(package))) == list(map(_number, TESTED[package]))
    for package in ("transformers", "peft"):
        oldest, newest = map(_number, _bounds(package))
        assert oldest <= _number(CONSTRAINTS[package]) <= newest
    for package, versions in TESTED.items():
        oldest, newest = map(_number, versions)
        assert oldest <= _number(CONSTRAINTS[package]) <= newest


def test_the_command_installs_a_version_that_pyproject_allows() -> None:
    for package, command in {
        "transformers": "'transformers[<>=]",
        "sklearn": "'scikit-learn>=",
        "imageio": r"'imageio\[ffmpeg\]>=",
        "no_such": "'no_such'$",
    }.items():
        assert re.match(f"pip install {command}", install_command(package))


def fail(kind: str) -> None:
    """Raise the error of an import, of diffusers' lazy import, or of its class in place of a pipeline."""
    if kind == "backend":
        raise ImportError("\nFluxPipeline requires the transformers library but it was not found in your environment")
    if kind == "placeholder":
        from diffusers.utils.dummy_torch_and_transformers_objects import FluxPipeline

        FluxPipeline._get_signature_types()
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        if kind == "module":
            raise
        if kind == "cause":
            raise RuntimeError("Failed to import diffusers.pipelines") from error
        raise AttributeError("module diffusers has no attribute X")  # noqa: B904


@pytest.mark.parametrize("kind", ["module", "cause", "context", "backend", "placeholder"])
def test_the_missing_package_is_found_behind_the_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises((ImportError, RuntimeError, AttributeError)) as raised:
        fail(kind)
    expected = f"this run needs the package transformers, which is not installed: {install_command('transformers')}"
    assert missing_package(raised.value, "this run") == expected
    failure = failure_of(raised.value, 1)
    assert (failure.kind, failure.message) == (FailureKind.REFUSED, expected)


def test_an_error_with_another_cause_stays_itself() -> None:
    assert missing_package(ImportError("cannot import name 'x' from 'torch'"), "this run") is None
    assert missing_package(ModuleNotFoundError("no", name="lightning_cp.x"), "this run") is None
