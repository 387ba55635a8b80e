"""Ranks of two jobs at one port are one error; errors of other ranks run no code."""

from __future__ import annotations

import os

import pytest

from lightning_cp import parallelize_pipeline
from lightning_cp.config import ContextParallelConfig
from lightning_cp.errors import CacheError, PeerMismatchError
from lightning_cp.fabric import ContextParallelStrategy
from lightning_cp.finetune.precompute.ranks import RankError
from tests.dist.lightning_ranks import fabric_of
from tests.harness import RankPool
from tests.pipelines import PIPES


def _set_up(rank: int, world: int, how: str) -> str:
    """What set-up says if the last rank belongs to another job."""
    os.environ["SLURM_JOB_ID"] = "12" if rank == world - 1 else "11"
    try:
        if how == "strategy":
            fabric_of(rank, world, ContextParallelStrategy(ring=world))
        else:
            parallelize_pipeline(PIPES["flux"].make(), ContextParallelConfig(ring_degree=world))
    except PeerMismatchError as error:
        return str(error)
    finally:
        del os.environ["SLURM_JOB_ID"]
    return ""


@pytest.mark.parametrize("how", ["strategy", "pipeline"])
def test_two_jobs_at_one_port_are_an_error_on_every_rank(run_ranks: RankPool, how: str) -> None:
    for said in run_ranks(3, _set_up, how, init=how != "strategy"):
        assert "SLURM_JOB_ID=11" in said
        assert "SLURM_JOB_ID=12" in said
        assert "rank 2" in said


@pytest.mark.parametrize("kind", ["exec", "SystemExit", "eval", "inspect", "RankError", "__import__", "BaseException"])
def test_an_error_of_another_rank_has_a_known_class(kind: str) -> None:
    found = RankError(1, kind, "raise SystemError('ran')", "trace").exception()
    assert type(found) is RuntimeError
    assert str(found) == "raise SystemError('ran')"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (CacheError("full"), CacheError, "full"),
        (MemoryError("large"), MemoryError, "large"),
        (ValueError("of torch"), RuntimeError, "ValueError: of torch"),
        (type("CacheError", (Exception,), {})("other"), RuntimeError, "CacheError: other"),
    ],
)
def test_errors_keep_their_class_if_other_ranks_know_it(error: Exception, kind: type, text: str) -> None:
    found = RankError.of(2, error).exception()
    assert (type(found), str(found)) == (kind, text)
