"""Sharded weights: gradients, norms and weights against one process on the global batch, in both flavours."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_cp.fabric import ContextParallelFSDPStrategy
from lightning_cp.pytorch import ContextParallelFSDPStrategy as TrainersStrategy
from tests.dist.models import wan
from tests.dist.module import Clips, TrainsWan
from tests.dist.test_trainer_strategy import QUIET, everyones
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
ARGUMENTS = {
    "hidden_states": torch.randn(4, 4, 3, 6, 10, generator=torch.Generator().manual_seed(2)),
    "encoder_hidden_states": torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(3)),
    "timestep": torch.tensor([4, 9, 44, 700]),
}


def fabric_of(rank: int, world: int, strategy: Any, **settings: Any) -> Fabric:
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(world))
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, **settings)
    fabric.launch()
    return fabric


def whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def flat(module: nn.Module, *, gradients: bool = False) -> Tensor:
    return torch.cat([whole(p.grad if gradients else p.detach()).flatten() for p in module.parameters()])


def held_bytes(module: nn.Module) -> int:
    return sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel() * p.element_size() for p in module.parameters()
    )


def _train(rank: int, world: int, settings: dict[str, Any]) -> dict[str, float]:
    reference = wan().build().float()
    reference(**ARGUMENTS, return_dict=False)[0].square().mean().backward()
    expected, whole_bytes = flat(reference, gradients=True), held_bytes(reference)
    strategy = ContextParallelFSDPStrategy(**settings)
    fabric = fabric_of(rank, world, strategy)
    model = wan().build().float()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    share = 4 // strategy.data_size
    mine = slice(strategy.data_rank * share, (strategy.data_rank + 1) * share)
    for half in range(2):
        with fabric.no_backward_sync(wrapped, enabled=half == 0):
            out = wrapped(**{name: x[mine] for name, x in ARGUMENTS.items()}, return_dict=False)[0]
            fabric.backward(out.square().mean() / 2)
    found = flat(model, gradients=True)
    norm = fabric.clip_gradients(wrapped, optimizer, max_norm=0.5, error_if_nonfinite=False)
    optimizer.step()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    return {
        "gradient": float((found - expected).norm() / expected.norm()),
        "norm": abs(float(whole(norm)) / float(expected.norm()) - 1),
        "weights": float((flat(model) - flat(reference)).norm() / flat(reference).norm()),
        "share": held_bytes(model) / whole_bytes,
        "data": strategy.data_size,
    }


@pytest.mark.parametrize(
    ("world", "settings", "data", "holders"),
    [
        (2, {"ring": 2}, 1, 2),
        (3, {"ring": 3}, 1, 3),
        (3, {"ulysses": 3}, 1, 3),
        (4, {"ring": 2, "ulysses": 2}, 1, 4),
        (4, {"ring": 2}, 2, 4),
        (4, {"ring": 2, "replicate": 2}, 2, 2),
        (4, {"ring": 2, "reshard_after_forward": False}, 2, 4),
    ],
)
def test_gradients_are_those_of_one_process_and_weights_are_shared(
    run_ranks: RankPool, world: int, settings: dict[str, Any], data: int, holders: int
) -> None:
    for found in run_ranks(world, _train, settings, init=False):
        assert found["data"] == data
        assert found["gradient"] < 1e-5
        assert found["norm"] < 1e-5
        assert found["weights"] < 1e-5
        assert found["share"] < 1 / holders + 0.1


def _fit(rank: int, world: int, settings: dict[str, Any]) -> float:
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(world))
    module, data = TrainsWan(), Clips(16)
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=TrainersStrategy(**settings),
        max_steps=3,
        gradient_clip_val=0.5,
        **QUIET,  # type: ignore[arg-type]
    )
    trainer.fit(module, DataLoader(data, batch_size=2))
    assert all(isinstance(p, DTensor) for p in module.parameters())
    found, seen = flat(module), everyones(module.seen)
    trainer.validate(module, DataLoader(data, batch_size=2), verbose=False)

    reference = TrainsWan()
    start, optimizer = flat(reference), torch.optim.SGD(reference.parameters(), lr=module.lr)
    for step in range(3):
        indices = [index for group in seen[:: trainer.strategy.context_size] for index in group[step]]  # type: ignore[attr-defined]
        batch = next(iter(DataLoader([data[index] for index in indices], batch_size=len(indices))))  # type: ignore[arg-type]
        reference.loss(batch).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = flat(reference)
    return float((found - expected).norm() / (expected - start).norm())


@pytest.mark.parametrize(("world", "settings"), [(2, {"ring": 2}), (4, {"ulysses": 2})])
def test_the_trainer_fits_as_one_process(run_ranks: RankPool, world: int, settings: dict[str, Any]) -> None:
    assert max(run_ranks(world, _fit, settings, init=False)) < 1e-4
