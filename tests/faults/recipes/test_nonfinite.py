"""Losses, gradients and weights that are not finite: the run ends with one clear error, and good checkpoints stay."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_cp.checkpoint import latest_checkpoint
from lightning_cp.checkpoint.store import load_checkpoint
from lightning_cp.training.finite import find_nonfinite, find_ranks
from tests.e2e.recipe import SMALL, Finished, error_of, run
from tests.harness import RankPool

SPOILT = ("data.dataset._target_=tests.faults.data.SpoiltDigits", "+data.dataset.fault=nan")


def spoilt_run(*settings: str, share: int, rank: int, count: int, folder: Path) -> Finished:
    """Five steps; the data of the third is NaN. Args: share: samples of a rank in a step. count: of them, NaN."""
    third = (*SPOILT, f"+data.dataset.after={2 * share}", f"+data.dataset.rank={rank}", f"+data.dataset.count={count}")
    return run(*SMALL, "max_steps=5", "checkpoint_every=2", *third, *settings, folder=folder)


def checkpoints(finished: Finished) -> list[str]:
    return sorted(path.name for path in (finished.folder / "checkpoints").glob("step_*"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "share", "rank"),
    [
        ("strategy=cp data_parallel=2", 6, 1),
        ("strategy=cp_fsdp ring=3 strategy.check_peers=off", 12, -1),
        ("strategy=cp_fsdp data_parallel=2 trainer=lightning checkpoint_async=true", 6, 0),
    ],
)
def test_nan_in_the_data_ends_the_run_on_all_ranks(settings: str, share: int, rank: int, tmp_path: Path) -> None:
    finished = spoilt_run(*settings.split(), share=share, rank=rank, count=1, folder=tmp_path / "run")
    assert finished.exit_code == 1
    said = error_of(finished)
    where = f" on rank {rank}" if "data_parallel" in settings else ""
    assert said.startswith(f"error: step 3: the loss is nan{where}")
    assert (
        f"The last good checkpoint is {finished.folder / 'checkpoints' / 'step_00000002'}: use a lower optim.lr" in said
    )
    assert checkpoints(finished) == ["step_00000002"]
    assert [math.isfinite(row.loss) for row in finished.rows] == [True, True, False]
    assert "Trained" not in finished.stdout


@pytest.mark.parametrize(
    ("settings", "share"),
    [("strategy=cp data_parallel=2 trainer=lightning", 6), ("strategy=cp_fsdp ring=2 data_parallel=2", 6)],
)
@pytest.mark.full
def test_a_step_can_be_skipped(settings: str, share: int, tmp_path: Path) -> None:
    finished = spoilt_run(
        *settings.split(), "on_nonfinite=skip", share=share, rank=0, count=share, folder=tmp_path / "run"
    )
    assert finished.exit_code == 0, finished.stderr
    assert [row.skipped for row in finished.rows] == [0, 0, 1, 1, 1]
    assert [math.isfinite(row.loss) for row in finished.rows] == [True, True, False, True, True]
    assert finished.rows[-1].loss < finished.rows[0].loss * 1.5
    assert "Trained 5 steps" in finished.stdout
    assert "1 of these steps were skipped, because their loss or gradient was not finite." in finished.stdout
    assert checkpoints(finished) == ["step_00000004", "step_00000005"]
    newest = latest_checkpoint(finished.folder)
    assert newest is not None
    saved = load_checkpoint(newest)
    assert all(x.isfinite().all() for x in saved.states["model"].values())
    assert saved.facts["skipped"] == 1


@pytest.mark.full
def test_ignored_nan_is_never_saved_and_its_samples_are_marked(tmp_path: Path) -> None:
    finished = spoilt_run("on_nonfinite=ignore", share=12, rank=0, count=1, folder=tmp_path / "run")
    assert finished.exit_code == 0, finished.stderr
    assert checkpoints(finished) == ["step_00000002"]
    assert finished.stderr.count("weights are not finite and are not saved") == 2
    assert "recognises 0.0% of 10 samples" in finished.stdout
    assert "Traceback" not in finished.stderr


@pytest.mark.full
def test_a_learning_rate_that_is_far_too_high_ends_the_run_with_advice(tmp_path: Path) -> None:
    settings = ("optim.lr=1e6", "max_steps=200", "checkpoint_every=10", "strategy=cp", "ring=2")
    finished = run(*SMALL, *settings, "trainer=lightning", folder=tmp_path / "run")
    assert finished.exit_code == 1
    assert "use a lower optim.lr" in error_of(finished)
    assert "Trained" not in finished.stdout


def find_on_one_rank(rank: int, world: int) -> tuple[list[str], str]:
    """Each rank has a tensor of its own that is NaN on rank 1; returns what this rank finds."""

    def all_reduce(x: torch.Tensor, reduce_op: str) -> torch.Tensor:
        assert reduce_op == "mean"
        dist.all_reduce(x)
        return x / world

    ranks: Any = SimpleNamespace(device=torch.device("cpu"), global_rank=rank, all_reduce=all_reduce)
    own = torch.tensor([1.0, math.nan if rank == 1 else 2.0])
    loss = torch.tensor(math.inf if rank >= 1 else 1.0)
    return find_nonfinite([("a", [torch.ones(3)]), ("b", [own]), ("c", [])], ranks), find_ranks(loss, ranks)


def test_all_ranks_name_the_same(run_ranks: RankPool) -> None:
    assert run_ranks(3, find_on_one_rank) == [(["b"], " on rank 1, 2")] * 3
