"""Stages for a GPU continue: after a crash in a new process, and after an interrupted run in the next run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_cp.recipes.benchmarks.gpu import run as runner
from lightning_cp.recipes.benchmarks.gpu.page import errors_of, tables_of
from lightning_cp.recipes.benchmarks.gpu.results import Result, read_results
from tests.unit.recipes.benchmarks import fake_measurements

ROOT = Path(__file__).parents[4]
CONFIG = {"device": "cpu", "stages": ["errors"], "stage_s": 100, "total_s": 400, "errors": {"tokens": 8}}


def run(folder: Path, **given: object) -> dict[str, Result]:
    """Run the fake stage. Returns: its results."""
    runner.MEASUREMENTS = fake_measurements.__file__
    return runner.run_stages(OmegaConf.create(CONFIG | given), folder)["errors"]


@pytest.fixture(autouse=True)
def _runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MEASUREMENTS", runner.MEASUREMENTS)


@pytest.mark.full
def test_a_crash_ends_one_measurement_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "crash").touch()
    results = run(tmp_path)
    assert (tmp_path / "ran.txt").read_text() == "abcd", "c ran in a second process, and d in a third"
    assert [name for name, result in results.items() if not result.error] == ["a", "d"]
    assert results["b"].error == "ended by SIGABRT; .out of order", "the end of the output"
    assert results["c"].error.startswith("AssertionError: broken")
    assert tables_of(results) == {"table": [["column"], ["a"], ["d"]]}, "what a failed one added is not stored"
    assert read_results(tmp_path / "results.json") == {"errors": results}
    (tmp_path / "crash").unlink()
    results = run(tmp_path)
    assert (tmp_path / "ran.txt").read_text() == "abcdbc", "only what failed runs again"
    assert "errors: continues after 2 measurements of an earlier run" in capsys.readouterr().out
    assert errors_of(results) == ""
    assert [check.name for result in results.values() for check in result.checks] == ["a", "d", "b", "c"]


def _wait_for(path: Path) -> str:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not appear"
        time.sleep(0.05)
    return path.read_text()


def _ended(pid: int) -> bool:
    """True if the process ended, or waits for a parent that is gone to read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.full
def test_a_run_that_is_killed_goes_on_inside_of_its_stage(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    code = (
        "import sys; from pathlib import Path; from tests.unit.recipes.benchmarks import test_gpu_runner as test; "
        "test.run(Path(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    try:
        stage = int(_wait_for(tmp_path / "pid.txt"))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    until = time.monotonic() + 60
    while not _ended(stage):
        assert time.monotonic() < until, "the stage outlives the run that started it"
        time.sleep(0.05)
    assert read_results(tmp_path / "results.json")["errors"]["d"].error == "cut off"
    (tmp_path / "hang").unlink()
    results = run(tmp_path)
    assert (tmp_path / "ran.txt").read_text() == "abcdd"
    assert errors_of(results) == ""


@pytest.mark.full
def test_a_stage_ends_after_its_limit_and_runs_again_with_other_settings(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    assert "ended after its limit of" in run(tmp_path, stage_s=30)["d"].error
    (tmp_path / "hang").unlink()
    run(tmp_path, errors={"tokens": 9})
    assert (tmp_path / "ran.txt").read_text() == "abcdabcd"


@pytest.mark.full
def test_the_stage_of_tests_counts_the_tests_of_each_file(tmp_path: Path) -> None:
    file = "tests/unit/recipes/benchmarks/test_trace.py"
    config = CONFIG | {"stages": ["tests"], "tests": {"files": [file]}}
    results = runner.run_stages(OmegaConf.create(config), tmp_path)["tests"]
    assert tables_of(results) == {"Tests": [["file", "passed", "failed", "skipped"], [file, "4", "0", "0"]]}
