"""Feed-forwards in tiles with DDP and FSDP2: gradients against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.finetune.adapters.lora import LoraSettings, add_lora
from tests.dist.compare import nothing_narrowed
from tests.dist.lightning_ranks import fabric_of, whole
from tests.harness import RankPool
from tests.models import TINY

pytestmark = pytest.mark.filterwarnings("ignore")


def _model(adapters: bool) -> Any:
    model: Any = TINY["wan"].build().train()
    if adapters:
        torch.manual_seed(1)
        add_lora(model, LoraSettings(rank=2, targets=r".*ffn\.net\.(0\.proj|2)"))
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.1)
        model.double()
    return model


def _gradients(module: nn.Module) -> Tensor:
    return torch.cat([whole(p.grad).flatten().double() for p in module.parameters() if p.requires_grad])


def _error(rank: int, world: int, sharded: bool, adapters: bool, checkpointing: bool) -> float:
    """The relative error of all gradients."""
    inputs = TINY["wan"].arguments()
    with nothing_narrowed():
        reference = _model(adapters)
        reference(**inputs, return_dict=False)[0].square().mean().backward()
        expected = _gradients(reference)
        kind = ContextParallelFSDPStrategy if sharded else ContextParallelStrategy
        fabric = fabric_of(rank, world, kind(ring=world, mlp_tiles=3))
        model = _model(adapters)
        if checkpointing:
            model.enable_gradient_checkpointing()
        trained = [p for p in model.parameters() if p.requires_grad]
        wrapped, _ = fabric.setup(model, torch.optim.SGD(trained, lr=0.1))
        fabric.backward(wrapped(**inputs, return_dict=False)[0].square().mean())
        found = _gradients(model)
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(
    ("adapters", "checkpointing"),
    [(False, True), *(pytest.param(*x, marks=pytest.mark.full) for x in [(False, False), (True, True), (True, False)])],
)
def test_gradients_are_exact(
    run_ranks: RankPool, world: int, sharded: bool, adapters: bool, checkpointing: bool
) -> None:
    errors = run_ranks(world, _error, sharded, adapters, checkpointing)
    assert max(errors) < 1e-12, errors
