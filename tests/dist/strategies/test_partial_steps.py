"""Modules that run in some steps only, take turns or alternate `requires_grad`: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp.callbacks import EMACallback
from tests.dist.lightning_ranks import BY_PLAN, STRATEGIES, distance, fabric_of, flat, trainer_of
from tests.dist.module import inputs
from tests.dist.plain import Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, DECAY = 5, 0.5


class Two(LightningModule):
    """Two transformers, of which each backward trains one; `how` they take turns."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first, self.second, self.how = Plain(), Plain(), how
        if "frozen" in how:
            self.second.requires_grad_(requires_grad=False)

    def forward(self, name: str) -> Tensor:
        out: Tensor = getattr(self, name)(inputs())[0]
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(x.parameters(), lr=0.01, eps=1e-4) for x in (self.first, self.second)]

    def turns(self, step: int) -> list[str]:
        """The transformers that train in a step, in order."""
        both = ["first", "second"] if self.how == "frozen" else ["second", "first"]
        return [both, ["first"], ["second"]][step % 3]

    def take_turn(self, name: str) -> None:
        for other in ("first", "second"):
            getattr(self, other).requires_grad_(requires_grad=other == name)

    def training_step(self, _: Any, step: int) -> None:
        optimizers = dict(zip(("first", "second"), self.optimizers(), strict=True))  # type: ignore[arg-type]
        for name in self.turns(step):
            if self.how == "toggle":
                self.toggle_optimizer(optimizers[name])
            elif self.how != "plain":
                self.take_turn(name)
            optimizers[name].zero_grad()
            self.manual_backward(self(name))
            optimizers[name].step()
            if self.how == "toggle":
                self.untoggle_optimizer(optimizers[name])


def _take_turns(rank: int, world: int, flavour: str, kind: str, how: str, ring: int) -> list[Tensor]:
    """Train with the Trainer, or with Fabric; there, turns are taken between steps. Returns: weights, and averages."""
    model, strategy = Two(how), STRATEGIES[flavour, kind](ring=ring, **BY_PLAN)
    if flavour == "trainer":
        data: Any = [0] * STEPS * world
        average = EMACallback(DECAY)
        trainer = trainer_of(rank, world, strategy, max_epochs=1, limit_train_batches=STEPS, callbacks=[average])
        trainer.fit(model, DataLoader(data))
        own = flat(model)
        with average.averaged(trainer, model):
            return [own, flat(model)]
    fabric = fabric_of(rank, world, strategy)
    model.automatic_optimization = True  # Fabric does not know it
    wrapped: Any
    wrapped, *optimizers = fabric.setup(model, *model.configure_optimizers())
    for step in range(STEPS):
        for name in model.turns(step):
            if how != "plain":
                model.take_turn(name)
            optimizer: Any = optimizers[name == "second"]
            optimizer.zero_grad()
            fabric.backward(wrapped(name))
            optimizer.step()
    return [flat(model)]


@pytest.mark.parametrize(
    ("flavour", "world", "ring", "kind", "how"),
    [  # DDP refuses frozen weights that begin to train: test_trained_weights.py
        ("trainer", 2, 2, "cp", "requires_grad"),
        ("trainer", 3, 3, "cp", "toggle"),
        ("trainer", 4, 2, "cp_fsdp", "frozen"),
        ("fabric", 4, 2, "cp", "requires_grad"),
        ("fabric", 3, 3, "cp_fsdp", "plain"),
    ],
)
@pytest.mark.default(1)
def test_transformers_that_take_turns_train_as_in_one_process(
    run_ranks: RankPool, flavour: str, world: int, ring: int, kind: str, how: str
) -> None:
    model, start = Two(how).requires_grad_(requires_grad=True), flat(Two(how))
    optimizers, average, steps = model.configure_optimizers(), start, 0
    for step in range(STEPS):
        for name in model.turns(step):
            optimizers[name == "second"].zero_grad()
            model(name).backward()
            optimizers[name == "second"].step()
            steps += 1
        average = average.lerp(flat(model), 1 - min(DECAY, (1 + steps) / (10 + steps)))
    assert distance(flat(model), start) > 1e-2, "training moves the weights"
    for own, *averages in run_ranks(world, _take_turns, flavour, kind, how, ring, init=False):
        assert distance(own, flat(model)) < 1e-5
        assert len(averages) == (flavour == "trainer")
        assert all(distance(x, average) < 1e-5 for x in averages)
