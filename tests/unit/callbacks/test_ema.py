"""Averages of one Trainer in several fits and evaluations."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.callbacks import EMACallback, SamplingCallback
from tests.dist.lightning_ranks import QUIET

pytestmark = pytest.mark.filterwarnings("ignore")
_ROWS: DataLoader[Tensor] = DataLoader(torch.arange(8.0).view(8, 1).expand(8, 2) / 8, batch_size=2)  # type: ignore[arg-type]


class _Layer(LightningModule):
    """A linear layer that logs its weight in validation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2, bias=False)

    @override
    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    @override
    def validation_step(self, batch: Tensor, _: int) -> None:
        self.log("weight", self.layer.weight[0, 0])

    @override
    def predict_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layer.weight[0, 0].clone()

    @override
    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


def _fit(average: EMACallback, module: _Layer, *, epochs: int = 1) -> Trainer:
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[average], **QUIET)
    trainer.fit(module, _ROWS)
    return trainer


def _weight(average: EMACallback) -> Tensor:
    return average.state_dict()["layer.weight"].clone()


def test_the_average_follows_the_weights_that_the_trainer_has(tmp_path: Path) -> None:
    twice, thrice, average, module = EMACallback(0.9), EMACallback(0.9), EMACallback(0.9), _Layer()
    _fit(twice, _Layer(), epochs=2)
    _fit(thrice, _Layer(), epochs=3)
    trainer = _fit(average, module)
    first = _weight(average)
    trainer.save_checkpoint(tmp_path / "first.ckpt")

    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, _ROWS)
    assert torch.equal(_weight(average), _weight(twice)), "a second fit continues the average"

    (logged,) = trainer.validate(module, _ROWS, ckpt_path=str(tmp_path / "first.ckpt"), verbose=False)
    assert logged["weight"] == pytest.approx(float(first[0, 0])), "an evaluation uses the checkpoint's average"
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, _ROWS)  # from the checkpoint's weights and average, which started in inference mode
    assert not torch.equal(_weight(average), first)

    trainer.fit(module, _ROWS, ckpt_path=str(tmp_path / "first.ckpt"))
    assert torch.equal(_weight(average), _weight(thrice)), "a resumed fit takes the checkpoint's average"


def test_another_module_or_trainer_starts_a_new_average_with_a_warning() -> None:
    average, alone, module = EMACallback(0.9), EMACallback(0.9), _Layer()
    _fit(average, module)
    _fit(alone, _Layer())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(average, _Layer())
    assert sum("EMACallback starts a new average" in str(one.message) for one in caught) == 1
    assert torch.equal(_weight(average), _weight(alone))


@pytest.mark.parametrize("evaluate", [True, False])
def test_predictions_use_the_average(evaluate: bool) -> None:
    average, module = EMACallback(0.9, evaluate=evaluate), _Layer()
    trainer = _fit(average, module)
    own = module.layer.weight.detach().clone()
    used = _weight(average) if evaluate else own
    assert not torch.equal(_weight(average), own)
    assert all(x == used[0, 0] for x in trainer.predict(module, _ROWS) or [None])
    assert torch.equal(module.layer.weight, own)


class _Used(Callback):
    """The weight inside `SamplingCallback.averaged` after each step, and the module's own."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []
        self.drawing = SamplingCallback(lambda *_: torch.zeros(0), every_n_train_steps=100, at_end=False)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        weight = next(pl_module.parameters())
        own = weight[0, 0].item()
        with self.drawing.averaged(trainer, pl_module):
            self.seen.append((weight[0, 0].item(), own))


def test_an_average_that_was_never_updated_is_not_used() -> None:
    used, module = _Used(), _Layer()
    lightnings = EMAWeightAveraging(decay=0.5, update_starting_at_step=2)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[lightnings, used], **QUIET)
    trainer.fit(module, _ROWS)
    first, second, third, fourth = used.seen
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert third[0] == third[1], "the first update takes the weights"
    assert fourth[0] == pytest.approx((third[1] + fourth[1]) / 2)


def test_a_checkpoint_of_lightnings_average_is_not_resumed_without_it(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[EMAWeightAveraging(decay=0.5)], **QUIET)
    trainer.fit(_Layer(), _ROWS)
    trainer.save_checkpoint(tmp_path / "average.ckpt")
    resumed = Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[EMACallback(0.5)], **QUIET)
    with pytest.raises(ValueError, match="written with Lightning's WeightAveraging"):
        resumed.fit(_Layer(), _ROWS, ckpt_path=str(tmp_path / "average.ckpt"))
