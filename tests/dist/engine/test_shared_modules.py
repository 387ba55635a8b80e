"""Sharded weights of one module object that is used in several places: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.fabric import ContextParallelFSDPStrategy
from lightning_cp.pytorch import ContextParallelFSDPStrategy as TrainersStrategy
from tests.dist.lightning_ranks import fabric_of, flat, trainer_of
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
INPUT = torch.arange(6.0).view(2, 3) / 6


class _Branch(nn.Module):
    """Embed, then two blocks that share a layer, and one block twice."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        shared, repeated = nn.Linear(3, 3), nn.Linear(3, 3)
        self.embed = embed
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), shared) for _ in range(2))
        self.repeated = nn.ModuleList([repeated, repeated])

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (*self.blocks, *self.repeated):
            x = block(x).tanh()
        return x


class _Branches(LightningModule):
    """Two branches with one embedding, as a transformer and its ControlNet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = _Branch(nn.Linear(3, 3))
        self.right = _Branch(self.left.embed)

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x) * self.right(x + 1)
        return out

    @override
    def training_step(self, x: Tensor, _: int) -> Tensor:
        return self.left(x).mul(self.right(x + 1)).square().sum()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _shared(rank: int, world: int) -> tuple[float, float, float]:
    """Return the errors of forward and gradients with Fabric, and of the weights after two steps of the Trainer."""
    reference, trained = _Branches(), _Branches()
    expected = reference(INPUT)
    expected.square().sum().backward()
    module = _Branches()
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world))
    out = fabric.setup(module)(INPUT)
    fabric.backward(out.square().sum())
    gradient = flat(reference, gradients=True)
    error = float((flat(module, gradients=True) - gradient).norm() / gradient.norm())

    trainer = trainer_of(rank, world, TrainersStrategy(ring=world), max_steps=2)
    trainer.fit(trained, DataLoader(INPUT.repeat(2, 1), batch_size=2))  # type: ignore[arg-type]
    optimizer, start = reference.configure_optimizers(), flat(reference)
    for _ in range(2):
        optimizer.zero_grad()
        reference.training_step(INPUT, 0).backward()
        optimizer.step()
    moved = flat(reference)
    return float((out - expected).abs().max()), error, float((flat(trained) - moved).norm() / (moved - start).norm())


def test_a_module_in_several_places_trains_as_in_one_process(run_ranks: RankPool) -> None:
    for forward, gradients, weights in run_ranks(3, _shared, init=False):
        assert forward < 1e-6
        assert gradients < 1e-5
        assert weights < 1e-4
