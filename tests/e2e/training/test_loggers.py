"""Loggers of `logger=`: every value of metrics.csv is logged too, with Fabric and with the Trainer."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.e2e.recipe import SMALL, Finished, run

COMMON = (*SMALL, "max_steps=3", "progress=false", "accelerator=cpu", "log_every=2")


def train(folder: Path, *given: str) -> Finished:
    finished = run(*COMMON, *given, folder=folder)
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    return finished


@pytest.mark.parametrize("given", [(), ("trainer=lightning", "strategy=cp", "ring=3")], ids=" ".join)
@pytest.mark.full
def test_tensorboard_has_the_values_of_metrics_csv(given: tuple[str, ...], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finished = train(tmp_path / "run", "logger=tensorboard", *given)
    events = EventAccumulator(str(finished.folder / "tensorboard"))
    events.Reload()
    (row,) = (asdict(row) for row in finished.rows if row.step == 2)
    for name in ("loss", "lr", "grad_norm", "sigma", "tokens_per_s", "peak_memory_gib", "step_time_s"):
        (logged,) = events.Scalars(name)
        assert logged.step == 2
        assert math.isfinite(logged.value)
        assert logged.value == pytest.approx(row[name], rel=1e-6)
    assert "val_loss" not in events.Tags()["scalars"]


@pytest.mark.full
def test_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    finished = train(tmp_path / "run", "logger=wandb", "logger.offline=true")
    assert list(finished.folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(finished.rows) == 2
