"""Settings of the callbacks: refused by name, with what is valid."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cp.callbacks import EMACallback, SamplingCallback, StepMetrics, sampling
from tests.dist.lightning_ranks import QUIET


@pytest.mark.parametrize("decay", [1, 1.5, -0.1, float("nan"), True, "0.9", None])
def test_an_ema_decay_outside_of_zero_to_one_is_refused(decay: Any) -> None:
    with pytest.raises(ValueError, match=r"^decay=.* must be a number from 0 to below 1"):
        EMACallback(decay)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ema_decay": 1.0}, r"ema_decay=1.0 must be a number from 0 to below 1, for instance 0.999"),
        ({"every_n_train_steps": 0}, r"every_n_train_steps=0 must be an integer of at least 1"),
        ({"every_n_train_steps": 2.5}, r"every_n_train_steps=2.5 must be an integer of at least 1"),
        ({"name": "../wide"}, r"name='../wide' must name a folder"),
        ({"value_range": (1.0, -1.0)}, r"value_range=\(1.0, -1.0\) must be \(black, white\) with black < white"),
    ],
)
def test_sampling_settings_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingCallback(lambda *_: torch.zeros(0), **{"every_n_train_steps": 1, **settings})


def test_evaluate_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="evaluate='yes' must be True or False"):
        EMACallback(evaluate="yes")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_two_sampling_callbacks_have_folders_and_averages_of_their_own(tmp_path: Path) -> None:
    def sampling(**settings: Any) -> SamplingCallback:
        return SamplingCallback(lambda *_: torch.zeros(1, 1, 4, 4), every_n_train_steps=2, **settings)

    checkpoint = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=2)
    pictures = [sampling(ema_decay=0.9), sampling(name="wide", ema_decay=0.1)]
    settings: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = Trainer(accelerator="cpu", max_steps=2, callbacks=[checkpoint, *pictures], **settings)
    trainer.fit(BoringModel())
    for name in ("samples", "wide"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["step_00000002.png"]
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    assert {"SamplingCallback", "SamplingCallback[wide]"} <= saved.keys()  # the first is that of older checkpoints
    for one in pictures:  # the averages after the last step, although ModelCheckpoint is first in the list
        average = saved[one.state_key]
        assert average
        for key, x in one.state_dict().items():
            assert torch.equal(average[key], x)
    assert not torch.equal(saved["SamplingCallback"]["layer.weight"], saved["SamplingCallback[wide]"]["layer.weight"])


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
    monkeypatch.setattr(sampling, "time", SimpleNamespace(perf_counter=lambda: clock.now))
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
