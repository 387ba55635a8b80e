"""Gradient accumulation: `micro_batch_size` changes neither losses nor weights, on any ranks and with both trainers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lightning_cp.checkpoint.store import load_checkpoint
from tests.e2e.recipe import SMALL, Finished, run

STEPS = 3
COMMON = ("warmup_steps=1", f"max_steps={STEPS}", "progress=false", "accelerator=cpu", "ema_decay=0.5")
TOPOLOGIES = (
    (),  # 5 + 5 + 2 samples
    ("strategy=cp", "ring=2", "data_parallel=2"),
    ("strategy=cp_fsdp", "ring=2", "data_parallel=2"),
    ("strategy=cp_fsdp", "ring=3", "trainer=lightning"),
)


def states(finished: Finished) -> dict[str, torch.Tensor]:
    """Return the weights and EMA weights after the last step."""
    saved = load_checkpoint(finished.folder / f"checkpoints/step_{STEPS:08d}").states
    return {f"{kind}.{name}": x for kind in ("model", "average") for name, x in saved[kind].items()}


def assert_equal(finished: Finished, whole: Finished, *, weights: float = 1e-6) -> None:
    """Compare losses, mean sigma, gradient norms, weights and EMA with a run that accumulates nothing.

    Args: weights: largest absolute difference of the weights.
    """
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    assert len(set(whole.losses)) == STEPS
    for ours, expected in zip(finished.rows, whole.rows, strict=True):
        assert ours.loss == pytest.approx(expected.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert ours.sigma == pytest.approx(expected.sigma, rel=1e-6)
        assert 0 < ours.sigma < 1
        assert math.isfinite(ours.peak_memory_gib)
        assert ours.peak_memory_gib > 0.1
    mine, reference = states(finished), states(whole)
    assert mine.keys() == reference.keys()
    for name, x in mine.items():
        torch.testing.assert_close(x, reference[name], rtol=1e-6, atol=weights, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run(*SMALL, *COMMON, folder=tmp_path_factory.mktemp("main") / "run")
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    return finished


@pytest.mark.full
@pytest.mark.parametrize("given", TOPOLOGIES, ids=" ".join)
def test_the_main_job_is_the_same(main_job: Finished, given: tuple[str, ...], tmp_path: Path) -> None:
    size = 4 if "data_parallel=2" in given else 5
    finished = run(*SMALL, *COMMON, *given, f"micro_batch_size={size}", folder=tmp_path / "run")
    assert_equal(finished, main_job)
