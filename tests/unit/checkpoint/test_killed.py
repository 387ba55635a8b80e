"""A writer that is killed at any moment leaves a whole checkpoint."""

import sys
from pathlib import Path

from tests.harness import warm


def test_at_every_call_that_changes_the_disk(tmp_path: Path) -> None:
    ended = warm.run([sys.executable, "-m", "tests.unit.checkpoint.killed", str(tmp_path)], timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    steps = [[int(word) for word in line.split()] for line in ended.stdout.splitlines()]
    over, beside, over_without_exchange = steps
    assert set(over) == set(over_without_exchange) == {5}
    assert beside == sorted(beside)
    assert set(beside) == {5, 6}
    assert len(over) > 10
