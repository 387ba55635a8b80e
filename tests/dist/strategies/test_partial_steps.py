"""Modules that run in some steps only, take turns or alternate `requires_grad`: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cp.callbacks import EMACallback
from tests.dist.lightning_ranks import BY_PLAN, QUIET, STRATEGIES, distance, fabric_of, flat, trainer_of
from tests.dist.module import Mixed, inputs
from tests.dist.plain import Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 5


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


def _take_turns(rank: int, world: int, flavour: str, kind: str, how: str, ring: int) -> Tensor:
    """Train with the Trainer, or with Fabric; there, turns are taken between steps."""
    model, strategy = Two(how), STRATEGIES[flavour, kind](ring=ring, **BY_PLAN)
    if flavour == "trainer":
        data: Any = [0] * STEPS * world
        trainer_of(rank, world, strategy, max_epochs=1, limit_train_batches=STEPS).fit(model, DataLoader(data))
        return flat(model)
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
    return flat(model)


@pytest.mark.parametrize(
    ("flavour", "world", "ring", "kind", "how"),
    [  # DDP refuses frozen weights that begin to train: test_trained_weights.py
        ("trainer", 2, 2, "cp", "requires_grad"),
        ("trainer", 3, 3, "cp", "toggle"),
        ("trainer", 4, 2, "cp_fsdp", "frozen"),
        ("trainer", 4, 2, "cp", "plain"),
        ("trainer", 3, 3, "cp_fsdp", "toggle"),
        ("fabric", 4, 2, "cp", "requires_grad"),
        ("fabric", 3, 3, "cp_fsdp", "plain"),
        ("fabric", 3, 3, "cp_fsdp", "frozen"),
    ],
)
@pytest.mark.default(1)
def test_transformers_that_take_turns_train_as_in_one_process(
    run_ranks: RankPool, flavour: str, world: int, ring: int, kind: str, how: str
) -> None:
    model, start = Two(how).requires_grad_(requires_grad=True), flat(Two(how))
    optimizers = model.configure_optimizers()
    for step in range(STEPS):
        for name in model.turns(step):
            optimizers[name == "second"].zero_grad()
            model(name).backward()
            optimizers[name == "second"].step()
    assert distance(flat(model), start) > 1e-2, "training moves the weights"
    for found in run_ranks(world, _take_turns, flavour, kind, how, ring, init=False):
        assert distance(found, flat(model)) < 1e-5


class _Turns(LightningModule):
    """As in a GAN: a critic that trains in each step, and a generator in every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = Mixed(0), Mixed(1)
        self.validated: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        judged: Tensor = self.critic(F.pad(x, (0, 13)))
        return judged

    def _step(self, optimizer: Any, loss: Any) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(0.1 * loss().square().mean())
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def training_step(self, x: Tensor, index: int) -> None:
        of_generator, of_critic = self.optimizers()  # type: ignore[misc]
        self._step(of_critic, lambda: self.critic(x) - self(self.generator(x).detach()))
        if index % 2:
            self._step(of_generator, lambda: self(self.generator(x)))

    def validation_step(self, x: Tensor, index: int) -> None:
        self.validated.append(flat(self))
        self.generator.plain.requires_grad_(requires_grad=False)  # as disable_adapters and enable_adapters
        self(self.generator(x))
        self.generator.plain.requires_grad_(requires_grad=True)

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
    own = flat(module)
    with average.averaged(trainer, module):
        return [own, flat(module), *module.validated]


@pytest.mark.parametrize(
    ("kind", "settings"), [("cp_fsdp", {"reshard_after_forward": False}), ("cp_fsdp", {}), ("cp", {})]
)
@pytest.mark.full
def test_a_critic_and_its_generator_train_and_are_averaged_as_in_one_process(
    run_ranks: RankPool, kind: str, settings: dict[str, Any]
) -> None:
    expected = _fit(0, 1, None, {})
    for found in run_ranks(3, _fit, kind, settings, init=False):
        for one, right in zip(found, expected, strict=True):
            assert distance(one, right) < 1e-5
