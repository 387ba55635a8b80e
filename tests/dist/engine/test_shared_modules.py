"""Sharded weights of one module object that is used in several places: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.dist.lightning_ranks import STRATEGIES, flat, train, train_alone
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
    def training_step(self, x: Tensor, _: int) -> Tensor:
        return self.left(x).mul(self.right(x + 1)).square().sum()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trained(rank: int, world: int, flavour: str) -> Tensor:
    module = _Branches()
    loader = DataLoader(INPUT.repeat(2, 1), batch_size=2)  # type: ignore[arg-type]
    train(rank, world, STRATEGIES[flavour, "cp_fsdp"](ring=world), module, loader)
    return flat(module)


@pytest.mark.parametrize("flavour", ["fabric", "trainer"])
def test_a_module_in_several_places_trains_as_in_one_process(run_ranks: RankPool, flavour: str) -> None:
    start, expected = flat(_Branches()), flat(train_alone(_Branches(), [INPUT] * 2))
    for found in run_ranks(3, _trained, flavour, init=False):
        assert (found - expected).norm() < 1e-5 * (expected - start).norm()
