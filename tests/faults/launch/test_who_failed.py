"""A rank that ends while others are in a collective with it: it is named, not the ranks that lost the connection."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_cp.launch import FailureKind, Job, LocalLauncher
from tests.harness.cases import in_turn

TARGETS = Path(__file__).with_name("ending.py")
ENDINGS = {
    "_exit 0": (FailureKind.EARLY, "rank {} exited with code 0 while other ranks were still running"),
    "return": (FailureKind.EARLY, "rank {} returned from the target while other ranks were still waiting for it"),
    "exit 0": (FailureKind.EARLY, "rank {} exited with code 0 while other ranks were still running"),
    "_exit 7": (FailureKind.EXIT, "rank {} ended with exit code 7"),
    f"signal {signal.SIGABRT:d}": (FailureKind.SIGNAL, "rank {} was ended by signal 6 (SIGABRT)"),
    f"signal {signal.SIGKILL:d}": (FailureKind.SIGNAL, "rank {} was ended by signal 9 (SIGKILL)"),
    "raise": (FailureKind.RAISED, "RuntimeError: raised on purpose"),
}


@pytest.mark.parametrize(("how", "rank"), in_turn(ENDINGS, (0, 2)))
@pytest.mark.full
def test_the_rank_that_left_the_collectives_is_named(how: str, rank: int, tmp_path: Path) -> None:
    OmegaConf.save(OmegaConf.create({"rank": rank, "how": how}), tmp_path / "config.yaml")
    job = Job(f"{TARGETS}:end_in_collectives", tmp_path / "config.yaml", 3, tmp_path / "logs", threads=1)
    failure = LocalLauncher(limit_s=150).launch(job).failure
    kind, message = ENDINGS[how]
    assert failure is not None
    assert (failure.rank, failure.kind) == (rank, kind), failure
    assert failure.message.startswith(message.format(rank))
