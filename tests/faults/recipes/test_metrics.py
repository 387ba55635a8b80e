"""Kills while a run that is resumed in its own folder takes over its metrics.csv."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_cp.checkpoint import folder as checkpoint_folder
from lightning_cp.checkpoint import latest_checkpoint, read_manifest
from lightning_cp.recipes.training import records
from lightning_cp.recipes.training.loop import StepReport
from lightning_cp.recipes.training.records import MetricsFile, read_metrics
from tests.e2e.recipe import SMALL, run, started

STEPS = 7


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at(number: int) -> Callable[[StepReport], list[Any]]:
    """In place of the function that formats a row: the process dies at the row with this number."""
    given: list[StepReport] = []
    cells = records._cells

    def format_or_die(report: StepReport) -> list[Any]:
        given.append(report)
        return die() or [] if len(given) == number else cells(report)

    return format_or_die


def resume_and_die(path: Path, owner: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
    """In a process of its own, resume at step 5 and write on, until the replaced function ends the process."""
    child = os.fork()
    if child == 0:
        setattr(owner, name, replacement)
        with MetricsFile(path, resumed_at=5) as metrics:
            for step in range(6, 9):
                metrics.watch(StepReport(step, 0.25, 1e-3, 1.0, 0.1, 64.0))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("owner", "name", "replacement", "steps"),
    [
        (checkpoint_folder, "scratch_folder_for", die, STEPS),
        *((records, "_cells", dies_at(row), STEPS) for row in (1, 3, 5)),
        (checkpoint_folder, "replace_folder", die, STEPS),
        (records, "_cells", dies_at(6), 5),  # with the first step's row: the old file is replaced already
        (records, "_cells", dies_at(8), 7),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.default(2)
def test_a_kill_leaves_the_old_rows(
    owner: ModuleType, name: str, replacement: Callable[..., Any], steps: int, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.csv"
    with MetricsFile(path) as metrics:
        for step in range(1, STEPS + 1):
            metrics.watch(StepReport(step, 0.5, 1e-3, 1.0, 0.1, 64.0))
    resume_and_die(path, owner, name, replacement)
    rows = read_metrics(path)
    assert [row.step for row in rows] == list(range(1, steps + 1))
    assert [row.loss for row in rows[:5]] == [0.5] * 5
    with MetricsFile(path, resumed_at=5) as metrics:
        metrics.watch(StepReport(6, 0.125, 1e-3, 1.0, 0.1, 64.0))
    assert [row.loss for row in read_metrics(path)] == [0.5] * 5 + [0.125]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.full
def test_kills_of_a_run_that_is_resumed_in_its_folder_lose_no_row(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(*SMALL, "max_steps=4", "checkpoint_every=2", folder=folder).exit_code == 0
    chance = random.Random(0)
    for _ in range(6):
        newest = latest_checkpoint(folder)
        assert newest is not None
        done = read_manifest(newest).step
        rows = read_metrics(folder / "metrics.csv")
        assert [row.step for row in rows][:done] == list(range(1, done + 1))
        assert [row.step for row in rows] == list(range(1, len(rows) + 1))
        with started(*SMALL, f"resume={folder}", "max_steps=100000", "checkpoint_every=2", folder=folder) as process:
            deadline = time.monotonic() + 100
            while read_metrics(folder / "metrics.csv") == rows and time.monotonic() < deadline:
                assert process.poll() is None, process.communicate()
                time.sleep(0.001)
            time.sleep(chance.random() / 5)
            process.kill()
