"""Runs that start at the same time, or in the same folder: no two of them write in one folder."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from lightning_cp.recipes.runs.run_folder import LOCK, claim, lock_folder, unlock_folder
from lightning_cp.recipes.settings.table import SettingsError
from lightning_cp.recipes.training.records import read_metrics
from tests.e2e.recipe import ROOT, ranks_of, started
from tests.e2e.training.test_sweep import SWEEPING, TORCHRUN
from tests.harness import warm
from tests.harness.cases import and_others

LIMIT_S = 100.0
SAME_MOMENT = "${output_root}/${now:%Y}"  # a name with the time, and equal for all runs of a test


def start(stack: ExitStack, *arguments: str, cwd: Path, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The sweep test's recipe, which trains nothing, without a folder of its own."""
    process = (subprocess.Popen if launcher else warm.Popen)(
        [sys.executable, *launcher, str(SWEEPING), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=cwd,
    )
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def assert_ended_well(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, stdout + stderr


def losses_of(runs: list[Path]) -> list[float]:
    """The first loss of each run: with the recipe of the sweep tests, the learning rate and 1."""
    return sorted(read_metrics(run / "metrics.csv")[0].loss - 1 for run in runs)


@pytest.mark.full
def test_runs_that_start_at_the_same_moment_have_a_folder_each(tmp_path: Path) -> None:
    count = 4
    with ExitStack() as stack:
        rates = [f"optim.lr={1 + i}" for i in range(count)]
        runs = [start(stack, f"hydra.run.dir={SAME_MOMENT}", rate, cwd=tmp_path) for rate in rates]
        assert_ended_well(runs)
    folders = sorted((tmp_path / "outputs").iterdir())
    assert len(folders) == count
    assert [folder.name.partition("_")[2] for folder in folders] == ["", *(str(2 + i) for i in range(count - 1))]
    assert losses_of(folders) == pytest.approx([1 + i for i in range(count)])
    for folder in folders:
        (rate,) = [line for line in (folder / ".hydra" / "config.yaml").read_text().splitlines() if "  lr:" in line]
        assert float(rate.split()[-1]) == pytest.approx(losses_of([folder])[0])


@pytest.mark.full
def test_sweeps_that_start_at_the_same_moment_have_a_folder_each(tmp_path: Path) -> None:
    count = 3
    with ExitStack() as stack:
        swept = [f"optim.lr={1 + 2 * i},{2 + 2 * i}" for i in range(count)]
        sweeps = [start(stack, "-m", f"hydra.sweep.dir={SAME_MOMENT}", rates, cwd=tmp_path) for rates in swept]
        assert_ended_well(sweeps)
    folders = sorted((tmp_path / "outputs").iterdir())
    assert len(folders) == count
    pairs = sorted(tuple(losses_of([folder / "0", folder / "1"])) for folder in folders)
    assert pairs == [pytest.approx((1 + 2 * i, 2 + 2 * i)) for i in range(count)]
    assert all((folder / "sweep.csv").is_file() and (folder / "multirun.yaml").is_file() for folder in folders)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["single", "sweep"])
def test_ranks_of_a_launcher_have_one_folder_between_them(mode: str, tmp_path: Path) -> None:
    kind = {"single": (f"hydra.run.dir={SAME_MOMENT}",), "sweep": ("-m", f"hydra.sweep.dir={SAME_MOMENT}")}[mode]
    with ExitStack() as stack:
        for rate in (1, 2):  # the second finds the name taken; two of torchrun's agents at once would share a port
            settings = (*kind, "strategy=cp", "ring=2", f"optim.lr={rate}")
            assert_ended_well([start(stack, *settings, cwd=tmp_path, launcher=TORCHRUN)])
    folders = sorted((tmp_path / "outputs").iterdir())
    assert [folder.name.partition("_")[2] for folder in folders] == ["", "2"]
    runs = folders if mode == "single" else [folder / "0" for folder in folders]
    assert losses_of(runs) == pytest.approx([1, 2])


@pytest.mark.full
def test_a_folder_that_a_run_writes_into_is_refused_to_another_until_that_run_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    mine = f"hydra.run.dir={folder}"
    with ExitStack() as stack:
        first = stack.enter_context(started("+fault=hang", "seed=1", folder=folder, script=SWEEPING))
        wait_for(folder / "metrics.csv")
        second = start(stack, mine, "seed=2", cwd=tmp_path)
        stdout, stderr = second.communicate(timeout=LIMIT_S)
        holder = f"process {first.pid} on {socket.gethostname()}"
        assert stderr.splitlines() == [
            f"error: hydra.run.dir={folder} is in use by {holder}, or by ranks that it started: wait until that run "
            "has ended, or use another folder"
        ]
        assert (second.returncode, stdout) == (2, "")
        assert "seed: 1" in (folder / ".hydra" / "config.yaml").read_text()
        (rank,) = ranks_of(first)
        stack.callback(end, rank)
        rank.suspend()
        first.kill()
        first.wait()
        third = start(stack, mine, "seed=3", cwd=tmp_path)
        assert f"is in use by {holder}, or by ranks" in third.communicate(timeout=LIMIT_S)[1]  # one is still there
        rank.resume()
        assert_ended_well([start(stack, mine, "seed=4", cwd=tmp_path)])
        psutil.wait_procs([rank], timeout=5)
    assert "seed: 4" in (folder / ".hydra" / "config.yaml").read_text()


@pytest.mark.full
def test_a_folder_in_use_is_refused_as_run_dir_too(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(started("+fault=hang", folder=tmp_path / "run", script=SWEEPING))
        wait_for(tmp_path / "run" / "metrics.csv")
        other = start(stack, f"run_dir={tmp_path / 'run'}", f"hydra.run.dir={tmp_path / 'b'}", cwd=tmp_path)
        assert (
            f"error: run_dir={tmp_path / 'run'} is in use by process {first.pid}"
            in other.communicate(timeout=LIMIT_S)[1]
        )
        assert other.returncode == 2


@pytest.mark.full
def test_of_runs_that_are_given_the_same_folder_at_once_one_runs(tmp_path: Path) -> None:
    count = 3
    with ExitStack() as stack:
        mine = (f"hydra.run.dir={tmp_path / 'run'}", "+fault=hang")
        runs = [start(stack, *mine, f"optim.lr={1 + i}", cwd=tmp_path) for i in range(count)]
        deadline = time.monotonic() + LIMIT_S
        while sum(run.poll() is None for run in runs) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (winner,) = [i for i, run in enumerate(runs) if run.poll() is None]
        assert all(run.returncode == 2 for i, run in enumerate(runs) if i != winner)
        wait_for(tmp_path / "run" / "metrics.csv")
        assert losses_of([tmp_path / "run"]) == pytest.approx([1 + winner])
        runs[winner].terminate()
        runs[winner].communicate(timeout=LIMIT_S)


@pytest.mark.full
def test_a_sweep_folder_in_use_is_refused_and_outcomes_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    with ExitStack() as stack:
        first = start(stack, "-m", f"hydra.sweep.dir={folder}", "+fault=none,hang", cwd=tmp_path)
        wait_for(folder / "1" / "metrics.csv")
        second = start(stack, "-m", f"hydra.sweep.dir={folder}", "seed=1,2", cwd=tmp_path)
        assert (
            f"error: hydra.sweep.dir={folder} is in use by process {first.pid}"
            in second.communicate(timeout=LIMIT_S)[1]
        )
        assert second.returncode == 2
        assert (folder / ".outcomes" / "0.json").is_file()
        first.terminate()
        first.communicate(timeout=LIMIT_S)


def test_a_claimed_folder_is_new(tmp_path: Path) -> None:
    wanted = tmp_path / "day" / "12_30"
    assert [claim(wanted).name for _ in range(3)] == ["12_30", "12_30_2", "12_30_3"]


def test_without_locks_of_the_file_system_the_run_continues_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    lock_folder(tmp_path, "run_dir")
    unlock_folder(tmp_path)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{tmp_path} is on a file system without locks (No locks available)" in said
    assert (tmp_path / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_folder_that_cannot_be_locked_for_another_reason_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(SettingsError, match=r"run_dir=.* cannot be locked: Input/output error; use another folder"):
        lock_folder(tmp_path, "run_dir")


def test_a_folder_that_cannot_be_written_to_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"run_dir=.*file/run cannot be written to: Not a directory"):
        lock_folder(tmp_path / "file" / "run", "run_dir")
    with ExitStack() as stack:
        run = start(stack, "output_root=file", cwd=tmp_path)
        stderr = run.communicate(timeout=LIMIT_S)[1]
    assert run.returncode == 2
    assert len(stderr.splitlines()) == 1
    assert "Not a directory" in stderr


def end(process: psutil.Process) -> None:
    """Kill a process that may have ended, stopped ones included."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.is_file():
        assert time.monotonic() < deadline, f"{path} has not come"
        time.sleep(0.05)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read_only"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no disk may be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


REFUSED = {
    "a run": ((), "output_root={}"),
    "a sweep": (("-m", "optim.lr=1,2"), "output_root={}"),
    "a chosen folder": (("hydra.run.dir={}/run",), "hydra.run.dir={}/run"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.default(1)
def test_an_output_root_that_cannot_be_written_to_is_an_error_in_one_line(
    name: str, read_only: Path, tmp_path: Path
) -> None:
    given, setting = REFUSED[name]
    with ExitStack() as stack:
        arguments = [*(one.format(read_only) for one in given), f"output_root={read_only}"]
        process = start(stack, *arguments, cwd=tmp_path)
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, stdout + stderr
    (line,) = stderr.splitlines()
    assert line.startswith(f"error: {setting.format(read_only)} ")
    assert "Read-only file system; set " in line
    assert stdout == ""


@pytest.mark.full
def test_under_a_launcher_the_error_is_printed_once(read_only: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        process = start(stack, f"output_root={read_only}", cwd=tmp_path, launcher=TORCHRUN)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert stderr.count("Read-only file system") == 1, stderr


@pytest.mark.parametrize("recipes", and_others(("check", "bench", "check_family", "precompute", "plan")))
@pytest.mark.default(1)
def test_other_recipes_refuse_a_folder_that_cannot_be_written_to_in_one_line(
    recipes: list[str], tmp_path: Path
) -> None:
    for recipe in recipes:
        process = warm.Popen(
            [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), "hydra.run.dir=/proc/none"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
        )
        stdout, stderr = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, stdout) == (2, "")
        (line,) = stderr.splitlines()
        assert line.startswith("error: hydra.run.dir=/proc/none cannot be written to: ")
