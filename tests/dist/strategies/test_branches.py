"""Data groups that run different modules with sharded weights: an error on every rank, before any wrong number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_cp.errors import PeerMismatchError
from tests.dist.lightning_ranks import BY_PLAN, STRATEGIES, flat, train
from tests.dist.plain import Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


class Experts(LightningModule):
    """Two transformers, of which each data group may choose one, and a frozen layer that some of them skip.

    Args: differs: what data groups do differently: "expert", "block", "gradients", "forwards" or nothing.
    """

    def __init__(self, data_rank: int, differs: str = "", depths: tuple[int, int] = (2, 2)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.high, self.low = Plain(), Plain()
        for expert, depth in zip((self.high, self.low), depths, strict=True):
            expert.blocks = expert.blocks[:depth]
        self.frozen = nn.Linear(16, 16).requires_grad_(requires_grad=False)
        self.data_rank, self.differs = data_rank, differs

    def training_step(self, _: Tensor, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.data_rank)
        x = torch.randn(1, 7, 16, generator=generator)
        odd = self.data_rank % 2 == 1
        x = self.frozen(x) if odd else x
        expert = self.low if (odd if self.differs == "expert" else step % 2) else self.high
        around = expert.around
        if self.differs == "block" and odd:
            expert.around = lambda block, x: x if block is expert.blocks[-1] else block(x)
        with torch.set_grad_enabled(not (self.differs == "gradients" and odd)):
            (out,) = checkpoint(expert, x, use_reentrant=False)
        expert.around = around
        if self.differs == "forwards" and odd:
            (out,) = expert(x)
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(rank: int, world: int, flavour: str, model: Experts, **settings: Any) -> None:
    """Take two steps."""
    strategy = STRATEGIES[flavour, "cp_fsdp"](**BY_PLAN, **settings)
    train(rank, world, strategy, model, DataLoader(torch.zeros(2 * world), batch_size=1))  # type: ignore[arg-type]


def _refused(rank: int, world: int, flavour: str, cases: list[tuple[str, tuple[int, int], str]]) -> list[str]:
    said = []
    for differs, depths, check_peers in cases:
        with pytest.raises(PeerMismatchError) as caught:
            _fit(rank, world, flavour, Experts(rank, differs, depths), check_peers=check_peers)
        said.append(str(caught.value))
    return said


FABRIC = [
    ("expert", (2, 2), "sampled", "rank 0 runs high (Plain), but rank 1 runs low (Plain)"),
    ("gradients", (2, 2), "first", "but rank 1 runs high (Plain) without gradients"),
    ("forwards", (2, 2), "sampled", "rank 0 runs a backward, but rank 1 runs high (Plain)"),
    ("block", (2, 2), "always", "rank 0 runs high.blocks.1 (Block), but rank 1 runs a backward"),
]
TRAINER = [("expert", (2, 1), "sampled", "rank 0 runs high (Plain), but rank 1 runs low (Plain)")]


@pytest.mark.parametrize(("flavour", "world", "cases"), [("fabric", 2, FABRIC), ("trainer", 3, TRAINER)])
def test_data_groups_that_run_different_modules_are_refused(
    run_ranks: RankPool, flavour: str, world: int, cases: list[tuple[str, tuple[int, int], str, str]]
) -> None:
    everyones = run_ranks(world, _refused, flavour, [case[:3] for case in cases], init=False)
    for said in everyones:
        assert said == everyones[0]
        for message, (*_, expected) in zip(said, cases, strict=True):
            assert expected in message
            assert "choose the module" in message


def _trained(rank: int, world: int) -> Tensor:
    model = Experts(rank)
    _fit(rank, world, "fabric", model, check_peers="always")
    return flat(model)


def test_one_expert_a_step_trains_as_one_process_does(run_ranks: RankPool) -> None:
    """A frozen layer may run on some ranks only, and checkpoints repeat forwards in the backward."""
    reference, start = Experts(0), flat(Experts(0))
    optimizer = reference.configure_optimizers()
    for step in range(2):
        for reference.data_rank in range(3):
            (reference.training_step(torch.zeros(1), step) / 3).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(3, _trained, init=False):
        assert (found - flat(reference)).norm() < 1e-4 * (flat(reference) - start).norm()
