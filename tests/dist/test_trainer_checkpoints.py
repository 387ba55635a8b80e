"""Lightning's own checkpoints: saved under one strategy and degree, gone on with under another."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_cp.pytorch import ContextParallelFSDPStrategy, ContextParallelStrategy
from tests.dist.module import Clips, TrainsWan
from tests.dist.test_trainer_strategy import QUIET
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


class Trains(TrainsWan):
    """With an optimizer that has a state."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


STRATEGIES: dict[str, Any] = {
    "ring": lambda: ContextParallelStrategy(ring=2),
    "ulysses": lambda: ContextParallelStrategy(ulysses=2),
    "sharded": lambda: ContextParallelFSDPStrategy(ring=2),
    "sharded, whole file": lambda: ContextParallelFSDPStrategy(ulysses=2, save_distributed_checkpoint=False),
}


def _weights(module: torch.nn.Module) -> Tensor:
    values = (p.detach() for p in module.parameters())
    return torch.cat([(x.full_tensor() if isinstance(x, DTensor) else x).flatten() for x in values])


def _train(strategy: str, steps: int, *, resume: Path | None = None, save: Path | None = None) -> Tensor:
    module = Trains()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[strategy](),
        max_steps=steps,
        use_distributed_sampler=False,
        **QUIET,  # type: ignore[arg-type]
    )
    loader = DataLoader(Clips(2), batch_size=2)
    trainer.fit(module, loader, ckpt_path=None if resume is None else str(resume))
    if save is not None:
        trainer.save_checkpoint(save)
    return _weights(module)


def _go_on(rank: int, world: int, first: str, then: str, folder: str) -> float:
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(world))
    straight = _train(first, 4)
    path = Path(folder) / "half.ckpt"
    half = _train(first, 2, save=path)
    resumed = _train(then, 4, resume=path)
    assert float((straight - half).norm()) > 1e-3
    return float((resumed - straight).norm() / (straight - half).norm())


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("ring", "ulysses", marks=pytest.mark.full),
        ("ring", "sharded"),
        ("sharded", "sharded, whole file"),
        pytest.param("sharded, whole file", "sharded", marks=pytest.mark.full),
        ("sharded, whole file", "ring"),
    ],
)
def test_a_fit_goes_on_under_another_strategy(run_ranks: RankPool, tmp_path: Path, first: str, then: str) -> None:
    assert max(run_ranks(2, _go_on, first, then, str(tmp_path), init=False)) < 1e-3
