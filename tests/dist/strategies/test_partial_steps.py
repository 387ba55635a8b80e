"""Modules that run in some steps only, and alternating `requires_grad`: as in one process, or refused on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.dist.lightning_ranks import fabric_of, flat, trainer_of
from tests.dist.plain import Plain
from tests.dist.strategies.test_initial_weights import BY_PLAN, STRATEGIES, inputs
from tests.harness import RankPool
from tests.harness.cases import pairwise

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 5


class Two(LightningModule):
    """Two transformers, of which each backward trains one; `how` they take turns."""

    def __init__(self, how: str, kind: type[nn.Module] = Plain) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first, self.second, self.how = kind(), kind(), how
        if "frozen" in how:
            self.second.requires_grad_(requires_grad=False)

    def losses(self, model: Any) -> Tensor:
        out: Tensor = getattr(self, model)(inputs())[0]
        return out.square().mean()

    forward = losses

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
            self.manual_backward(self.losses(name))
            optimizers[name].step()
            if self.how == "toggle":
                self.untoggle_optimizer(optimizers[name])


def distance(trained: nn.Module, how: str) -> float:
    """Relative distance of the weights from those of one process without a strategy."""
    model, start = Two(how).requires_grad_(requires_grad=True), flat(Two(how))
    optimizers = dict(zip(("first", "second"), model.configure_optimizers(), strict=True))
    for step in range(STEPS):
        for name in model.turns(step):
            optimizers[name].zero_grad()
            model.losses(name).backward()
            optimizers[name].step()
    assert float((flat(model) - start).norm() / start.norm()) > 1e-2, "training moves the weights"
    return float((flat(trained) - flat(model)).norm() / flat(model).norm())


def _trainer(rank: int, world: int, kind: str, how: str, ring: int) -> float:
    """Distance from one process."""
    model = Two(how)
    data: Any = [0] * STEPS * world
    trainer = trainer_of(
        rank,
        world,
        STRATEGIES["trainer", kind](ring=ring, **BY_PLAN),
        max_steps=-1,
        max_epochs=1,
        limit_train_batches=STEPS,
    )
    trainer.fit(model, DataLoader(data))
    return distance(model, how)


def _fabric(rank: int, world: int, kind: str, how: str, ring: int) -> float:
    """The same with Fabric; turns are taken between steps."""
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=ring, **BY_PLAN))
    model = Two(how)
    model.automatic_optimization = True  # Fabric does not know it
    wrapped: Any
    wrapped, *ready = fabric.setup(model, *model.configure_optimizers())
    optimizers: Any = dict(zip(("first", "second"), ready, strict=True))
    for step in range(STEPS):
        for name in model.turns(step):
            if how != "plain":
                model.take_turn(name)
            optimizers[name].zero_grad()
            fabric.backward(wrapped(name))
            optimizers[name].step()
    return distance(model, how)


CASES = [
    (_trainer, (2, 2), "cp", "requires_grad"),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in pairwise(
            (_trainer, _fabric),
            ((3, 3), (4, 2)),
            ("cp", "cp_fsdp"),
            ("plain", "requires_grad", "toggle", "frozen"),
            valid=lambda runner, _, kind, how: (
                (runner is _trainer or how != "toggle")
                and (kind == "cp_fsdp" or how != "frozen")  # DDP refuses it: test_trained_weights.py
            ),
        )
    ),
]


@pytest.mark.parametrize(("runner", "ranks", "kind", "how"), CASES)
def test_transformers_that_take_turns_train_as_in_one_process(
    runner: Any, ranks: tuple[int, int], kind: str, how: str, run_ranks: RankPool
) -> None:
    for found in run_ranks(ranks[0], runner, kind, how, ranks[1], init=False):
        assert found < 1e-5
