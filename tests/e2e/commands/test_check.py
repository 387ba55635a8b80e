"""recipes/check.py, by the guide: docs/plans.md's model and plan, as a reader would write them down."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import warm
from tests.harness.cases import and_others

_ROOT = Path(__file__).parents[3]
_GUIDE = re.findall(r"```python\n(.*?)```", (_ROOT / "docs" / "plans.md").read_text(encoding="utf-8"), re.DOTALL)


def _check(folder: Path, *settings: str, cold: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_ROOT / "recipes" / "check.py"), *settings]
    if cold:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)
    return warm.run(command, cwd=folder, timeout=150)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_model.py").write_text("\n\n".join(_GUIDE), encoding="utf-8")
    return tmp_path


@pytest.mark.full
def test_the_plan_of_the_guide_is_short_and_exact(folder: Path) -> None:
    assert len(_GUIDE[1].splitlines()) <= 20
    done = _check(folder, "model=my_model.py", "plan=my_model.py", "ranks=4", cold=True)
    assert done.returncode == 0, done.stderr
    for told in ("MyTransformer on 4 ranks", "ring allgather", "ring alltoall", "Ulysses", "unified", "exact in every"):
        assert told in done.stdout
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["my_model.py"]


@pytest.mark.full
def test_a_wrong_plan_is_reported_with_the_differences(folder: Path) -> None:
    file = folder / "my_model.py"
    file.write_text(file.read_text().replace('mask("text", "image")', 'mask("image", "text")'))
    done = _check(folder, "model=my_model.py", "plan=my_model.py")
    assert done.returncode == 1
    assert "differs by more than 1e-09" in done.stdout
    assert "output[0]" in done.stdout or "output output" in done.stdout
    assert "gradient blocks.0.self_qkv.weight" in done.stdout


def test_a_class_without_a_plan_is_refused_with_advice(folder: Path) -> None:
    done = _check(folder, "model=my_model.py")
    assert done.returncode == 1
    assert done.stderr.count("error:") == 1
    assert "no plan is registered for" in done.stderr
    assert "docs/plans.md" in done.stderr


_REFUSED = [
    (("model=my_model.py", "ranks=1"), "ranks=1 must be an integer of at least 2"),
    ((), "model=<file.py> must be set"),
    (("model=none.py",), "model=none.py does not exist"),
    (("model=no_such_module",), "must be a .py file or a module"),
]


@pytest.mark.parametrize("refused", and_others(_REFUSED))
@pytest.mark.default(1)
def test_bad_settings_are_refused_before_anything_starts(
    folder: Path, refused: list[tuple[tuple[str, ...], str]]
) -> None:
    for settings, told in refused:
        done = _check(folder, *settings)
        assert done.returncode == 2
        assert told in done.stderr
        assert "Traceback" not in done.stderr


def test_an_output_folder_that_cannot_be_created_is_refused_in_one_line(folder: Path) -> None:
    (folder / "file").touch()
    for recipe in ("check", "sample"):
        command = [sys.executable, str(_ROOT / "recipes" / f"{recipe}.py"), "hydra.run.dir=file/run"]
        done = warm.run(command, cwd=folder, timeout=150)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: hydra.run.dir=file/run cannot be written to: Not a directory")
        assert done.stderr.count("\n") == 1, done.stderr
