"""A writer that is killed at any moment leaves a whole checkpoint."""

import sys
from pathlib import Path

import pytest

from tests.harness import warm


def steps_after_kills(folder: Path, when: str) -> list[list[int]]:
    command = [sys.executable, "-m", "tests.unit.checkpoint.killed", str(folder), when]
    ended = warm.run(command, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [[int(word) for word in line.split()] for line in ended.stdout.splitlines()]


def test_at_every_call_that_changes_the_disk(tmp_path: Path) -> None:
    over, beside, over_without_exchange = steps_after_kills(tmp_path, "moments")
    assert set(over) == set(over_without_exchange) == {5}
    assert beside == sorted(beside)
    assert set(beside) == {5, 6}
    assert len(over) > 10


@pytest.mark.full
def test_at_random_times(tmp_path: Path) -> None:
    (steps,) = steps_after_kills(tmp_path, "times")
    assert steps == sorted(steps)
    assert steps[-1] > 0
