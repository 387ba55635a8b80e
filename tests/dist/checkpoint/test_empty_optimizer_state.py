"""Checkpoints of sharded weights whose optimizers have no state: SGD, or an optimizer that has not stepped yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from lightning_cp.fabric import ContextParallelFSDPStrategy
from lightning_cp.pytorch import ContextParallelFSDPStrategy as TrainersStrategy
from tests.dist.lightning_ranks import fabric_of, flat, trainer_of
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


class _Run:
    """A Fabric with two linear layers, each with an optimizer of its own."""

    def __init__(self, rank: int, world: int, kind: Any, *, sharded: bool) -> None:
        strategy = ContextParallelFSDPStrategy(ring=world, save_distributed_checkpoint=sharded)
        self.fabric = fabric_of(rank, world, strategy)
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizers = [kind(layer.parameters(), lr=0.1) for layer in self.module]
        self.model, *self.optimizers = self.fabric.setup(self.module, *optimizers)
        self.state = {"model": self.model, "first": self.optimizers[0], "second": self.optimizers[1]}

    def backward(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.fabric.backward(self.model(torch.arange(4.0)).square().sum())

    def go_on(self) -> Tensor:
        for _ in range(2):
            self.backward()
            for optimizer in self.optimizers:
                optimizer.step()
        return flat(self.module)


def _resume(rank: int, world: int, folder: str) -> list[tuple[str, float, float]]:
    """Save with no step, or after a step of the first optimizer. Returns: case, error, learning rate."""
    found = []
    cases = [(SGD, False, True), (AdamW, False, False), (AdamW, False, True), (AdamW, True, True)]
    for kind, sharded, stepped in cases:
        name = f"{kind.__name__} {sharded=} {stepped=}"
        path = Path(folder) / name
        run = _Run(rank, world, kind, sharded=sharded)
        if stepped:
            run.backward()
            run.optimizers[0].step()
        run.optimizers[1].param_groups[0]["lr"] = 0.3
        run.fabric.save(path, run.state)
        assert not run.optimizers[1].state, name
        run.go_on()
        resumed = _Run(rank, world, kind, sharded=sharded)
        resumed.fabric.load(path, resumed.state)
        error = float((resumed.go_on() - flat(run.module)).abs().max())
        found.append((name, error, resumed.optimizers[1].param_groups[0]["lr"]))
    return found


def _fit(rank: int, world: int, folder: str) -> list[float]:
    """Resume the Trainer with SGD, from one file and from a folder: errors against a fit without a break."""
    errors = []
    for sharded in (False, True):
        path = Path(folder) / f"fit_{sharded}.ckpt"
        fits = []
        for steps, resume in ((2, None), (1, None), (2, path)):
            strategy = TrainersStrategy(ring=world, save_distributed_checkpoint=sharded)
            trainer, module = trainer_of(rank, world, strategy, max_steps=steps), TrainsWan()
            clips = DataLoader(Clips(2), batch_size=2)
            trainer.fit(module, clips, ckpt_path=None if resume is None else str(resume))
            if steps == 1:
                trainer.save_checkpoint(path)
            fits.append(flat(module))
        assert not torch.equal(fits[0], fits[1])
        errors.append(float((fits[2] - fits[0]).abs().max()))
    return errors


@pytest.mark.full
def test_optimizers_without_state_go_on_as_if_never_saved(run_ranks: RankPool, tmp_path: Path) -> None:
    for cases in run_ranks(3, _resume, str(tmp_path), init=False):
        assert len(cases) == 4
        for name, error, rate in cases:
            assert error == 0, name
            assert rate == 0.3, name


@pytest.mark.full
def test_the_trainer_resumes_an_optimizer_that_never_has_a_state(run_ranks: RankPool, tmp_path: Path) -> None:
    assert run_ranks(3, _fit, str(tmp_path), init=False) == [[0.0, 0.0]] * 3
