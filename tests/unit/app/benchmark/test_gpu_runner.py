"""Stages for a GPU continue: after a crash in a new process, and after an interrupted run in the next run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.benchmark.gpu import log, runner
from lightning_cp.app.benchmark.gpu.results import StageResult, read_results, run_measurements
from tests.unit.app.benchmark import fake_stage

ROOT = Path(__file__).parents[4]
CONFIG = {"device": "cpu", "stages": ["errors"], "stage_s": 100, "total_s": 400, "errors": {"tokens": 8}}


def _config() -> DictConfig:
    return OmegaConf.create(CONFIG)


def _command(name: str, settings: Path, results: Path) -> list[str]:
    return [sys.executable, fake_stage.__file__, name, str(settings), str(results)]


@pytest.fixture(autouse=True)
def _fake_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "stage_command", _command)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(folder: Path) -> tuple[StageResult, list[str]]:
    """The stage's result, and the lines that were reported."""
    said: list[str] = []
    return runner.run_stages(_config(), folder, said.append)["errors"], said


def test_a_crash_ends_one_measurement_only(tmp_path: Path) -> None:
    (tmp_path / "crash").touch()
    result, _ = run(tmp_path)
    assert (tmp_path / "ran.txt").read_text() == "abcd", "c and d ran in a second process"
    assert result.finished == ["a", "c", "d"]
    assert result.error == "b: ended by SIGABRT; out of order"
    assert read_results(tmp_path / "results.json") == {"errors": result}
    assert (tmp_path / "log.txt").read_text().count("out of order") == 1
    (tmp_path / "crash").unlink()
    result, said = run(tmp_path)
    assert (tmp_path / "ran.txt").read_text() == "abcdb", "only what failed runs again"
    assert said[0] == "errors: continues after 3 measurements of an earlier run"
    assert (result.error, result.failed) == ("", {})
    assert [check.name for check in result.checks] == ["a", "c", "d", "b"]


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
        "import sys; from pathlib import Path; from tests.unit.app.benchmark import test_gpu_runner as test; "
        "test.runner.stage_command = test._command; test.run(Path(sys.argv[1]))"
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
    assert read_results(tmp_path / "results.json")["errors"].error == "cut off"
    (tmp_path / "hang").unlink()
    result, _ = run(tmp_path)
    assert (tmp_path / "ran.txt").read_text() == "abcdd"
    assert result.error == ""
    assert [check.name for check in result.checks] == ["a", "b", "c", "d"]


def test_what_an_unfinished_measurement_added_is_not_saved() -> None:
    saved: list[list[str]] = []
    result = StageResult({})

    def breaks(result: StageResult) -> None:
        result.add_row("table", ["column"], ["half"])
        raise RuntimeError("broken")

    measurements = [("whole", lambda result: result.add_row("table", ["column"], ["whole"])), ("half", breaks)]
    with pytest.raises(RuntimeError, match="broken"):
        run_measurements(measurements, result, lambda: saved.append([row[0] for x in result.tables for row in x.rows]))
    assert saved == [[], ["whole"], ["whole"]]
    assert (result.finished, result.started) == (["whole"], "half")


def test_a_log_keeps_the_first_and_the_last_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "HEAD_BYTES", 1000)
    monkeypatch.setattr(log, "TAIL_BYTES", 500)
    monkeypatch.setattr(log, "MAX_BYTES", 1800)
    sizes = []
    for letter in "ab":
        code = f"import sys; sys.stdout.write('first' + '{letter}' * 10**6 + 'last')"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        tail = log.LogWriter(process.stdout, tmp_path / "log.txt").finish(within_s=60)
        assert process.wait() == 0
        assert (len(tail), tail[-5:]) == (500, f"{letter}last")
        sizes.append((tmp_path / "log.txt").stat().st_size)
    assert sizes[0] == 1000 + len("\n[998509 bytes left out]\n") + 500
    assert sizes[1] == 1800 + len("\n[999234 bytes left out]\n") + 500
    text = (tmp_path / "log.txt").read_text()
    assert (text.count("first"), text.count("last")) == (2, 2)
    assert "[998509 bytes left out]" in text


def test_a_short_output_is_logged_once(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "print('short')"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert log.LogWriter(process.stdout, tmp_path / "log.txt").finish(within_s=60) == "short\n"
    process.wait()
    assert (tmp_path / "log.txt").read_text() == "short\n"
