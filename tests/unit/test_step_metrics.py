"""`StepMetrics` measures optimizer steps, also where a step has several batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cp.callbacks import StepMetrics, metrics

BATCHES, BATCH_S, STEP_S, BATCH_TOKENS = 10, 1.0, 0.5, 100


class Timed(LightningModule):
    """Each batch takes one second, each optimizer step half a second."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.layer, self.clock = nn.Linear(2, 1), clock

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.clock.now += BATCH_S
        return self.layer(batch).sum()  # type: ignore[no-any-return]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.clock.now += STEP_S

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Collected(Callback):
    """The metrics of each step, as loggers get them."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if len(self.found) < trainer.global_step:
            values = trainer.logged_metrics
            self.found.append((float(values["step_time_s"]), float(values["tokens_per_s"])))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("accumulated", "batches"), [(1, [1] * BATCHES), (4, [4, 4, 2])])
def test_time_and_tokens_are_those_of_an_optimizer_step(
    accumulated: int, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, collected = SimpleNamespace(now=0.0), Collected()
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        callbacks=[StepMetrics(tokens=accumulated * BATCH_TOKENS), collected],
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Timed(clock), DataLoader(list(torch.randn(BATCHES, 2)), batch_size=1))
    seconds = [n * BATCH_S + STEP_S for n in batches]
    expected = [(s, n * BATCH_TOKENS / s) for n, s in zip(batches, seconds, strict=True)]
    assert [x for pair in collected.found for x in pair] == pytest.approx([x for pair in expected for x in pair])
