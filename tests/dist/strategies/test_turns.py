"""Two modules that take turns, as in a GAN, with averaged weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.callbacks import EMACallback
from tests.dist.lightning_ranks import QUIET, flat, trainer_of
from tests.dist.strategies.test_initial_weights import BY_PLAN, STRATEGIES, Mixed, inputs
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


class _Turns(LightningModule):
    """A critic that trains in each step, and a generator in every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = Mixed(0), Mixed(1)
        self.validated: list[Tensor] = []

    def _judged(self, x: Tensor) -> Tensor:
        judged: Tensor = self.critic(F.pad(x, (0, 13)))
        return judged

    def _step(self, optimizer: Any, loss: Any) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(0.1 * loss().square().mean())
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    @override
    def training_step(self, x: Tensor, index: int) -> None:
        of_generator, of_critic = self.optimizers()  # type: ignore[misc]
        self._step(of_critic, lambda: self.critic(x) - self._judged(self.generator(x).detach()))
        if index % 2:
            self._step(of_generator, lambda: self._judged(self.generator(x)))

    @override
    def validation_step(self, x: Tensor, index: int) -> None:
        self.validated.append(flat(self))
        self.generator.plain.requires_grad_(requires_grad=False)  # as disable_adapters and enable_adapters
        self(x)
        self.generator.plain.requires_grad_(requires_grad=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self._judged(self.generator(x))

    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(x.parameters(), lr=0.5) for x in (self.generator, self.critic)]


def _fit(rank: int, world: int, kind: str | None, settings: dict[str, Any]) -> list[Tensor]:
    """Return the weights, their average, and the averages of the validations."""
    module, average = _Turns(), EMACallback(0.5)
    setup: dict[str, Any] = {"max_epochs": 1, "val_check_interval": 3, "callbacks": [average]}
    if kind is None:
        trainer = Trainer(accelerator="cpu", devices=1, **QUIET, **setup)
    else:
        trainer = trainer_of(rank, world, STRATEGIES["trainer", kind](ring=world, **BY_PLAN, **settings), **setup)
    loader = DataLoader([inputs()[0]] * 6, batch_size=1)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader)
    with average.averaged(trainer, module):
        averaged = flat(module)
    return [flat(module), averaged, *module.validated]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("cp_fsdp", {"reshard_after_forward": False}),
        pytest.param("cp_fsdp", {}, marks=pytest.mark.full),
        pytest.param("cp", {}, marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_modules_that_take_turns_train_and_are_averaged_as_in_one_process(
    run_ranks: RankPool, kind: str, settings: dict[str, Any]
) -> None:
    expected = _fit(0, 1, None, {})
    for found in run_ranks(3, _fit, kind, settings, init=False):
        for one, right in zip(found, expected, strict=True):
            assert (one - right).norm() < 1e-5 * right.norm()
