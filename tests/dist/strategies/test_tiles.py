"""Feed-forwards in tiles with DDP and FSDP2: gradients against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.finetune.settings import LoraSettings
from lightning_cp.plans import Plan, split
from tests.dist.compare import nothing_narrowed
from tests.dist.lightning_ranks import STRATEGIES, distance, fabric_of, whole
from tests.dist.plain import Plain
from tests.harness import RankPool
from tests.models import TINY

pytestmark = pytest.mark.filterwarnings("ignore")
ADAPTERS: dict[str, Any] = {"lora": {}, "lokr": {"lokr": 2}}


def _model(adapters: str = "") -> Any:
    model: Any = TINY["wan"].build().train()
    if adapters:
        torch.manual_seed(1)
        add_lora(model, LoraSettings(rank=2, targets=r".*ffn\.net\.(0\.proj|2)", **ADAPTERS[adapters]))
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.1)
        model.double()
    return model


def _gradients(module: nn.Module) -> Tensor:
    return torch.cat([whole(p.grad).flatten().double() for p in module.parameters() if p.requires_grad])


def _loss(model: nn.Module, factor: float) -> Tensor:
    inputs = TINY["wan"].arguments()
    inputs["hidden_states"] = factor * inputs["hidden_states"]
    loss: Tensor = model(**inputs, return_dict=False)[0].square().mean()
    return loss


def _trained(model: Any, fabric: Any, factors: tuple[float, ...], checkpointing: bool = False) -> Tensor:
    """The gradients of micro-batches, of which only the last one is reduced over ranks."""
    if checkpointing:
        model.enable_gradient_checkpointing()
    trained = [p for p in model.parameters() if p.requires_grad]
    wrapped, _ = fabric.setup(model, torch.optim.SGD(trained, lr=0.1))
    for i, factor in enumerate(factors):
        with fabric.no_backward_sync(wrapped, enabled=i < len(factors) - 1):
            fabric.backward(_loss(wrapped, factor))
    return _gradients(model)


def _error(
    rank: int, world: int, strategy: str, adapters: str, checkpointing: bool, factors: tuple[float, ...]
) -> float:
    """The relative error of all gradients."""
    with nothing_narrowed():
        reference = _model(adapters)
        for factor in factors:
            _loss(reference, factor).backward()
        expected = _gradients(reference)
        fabric = fabric_of(rank, world, STRATEGIES["fabric", strategy](ring=world, mlp_tiles=3))
        found = _trained(_model(adapters), fabric, factors, checkpointing)
    return distance(found, expected)


@pytest.mark.parametrize(
    ("strategy", "adapters", "checkpointing", "factors"),
    [("cp_fsdp", "", True, (1.0, 0.5, 2.0)), ("cp", "lora", True, (1.0, 0.5, 2.0)), ("cp_fsdp", "lokr", False, (1.0,))],
)
@pytest.mark.default(1)
def test_gradients_are_exact(
    run_ranks: RankPool, strategy: str, adapters: str, checkpointing: bool, factors: tuple[float, ...]
) -> None:
    errors = run_ranks(3, _error, strategy, adapters, checkpointing, factors)
    assert max(errors) < 1e-12, errors


class Own(nn.Module):
    """A feed-forward of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def _own(rank: int, world: int) -> tuple[float, int]:
    """The relative error of all gradients, and how often a feed-forward is called in a forward."""
    torch.manual_seed(0)
    model = Plain().double()
    for block in model.blocks:
        block.out = nn.Sequential(block.out, Own().double())
    plan = Plan(
        blocks={"blocks": {"x": split(1, "image")}}, gather={"proj_out": split(1, "image")}, feed_forwards=("out.1",)
    )
    x = torch.randn(2, 19, 16, dtype=torch.float64)
    model(x)[0].square().mean().backward()
    expected = _gradients(model)
    model.zero_grad()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), plan=plan, mlp_tiles=4)
    calls: list[None] = []
    model.blocks[0].out[1].act.register_forward_hook(lambda *_: calls.append(None))  # type: ignore[index,union-attr]
    output = model(x)[0]
    in_forward = len(calls)
    output.square().mean().backward()
    found = _gradients(model)
    torch.distributed.all_reduce(found)
    return distance(found / world, expected), in_forward


def test_feed_forwards_that_a_plan_names_are_tiled(run_ranks: RankPool) -> None:
    for error, calls in run_ranks(2, _own):
        assert error < 1e-12
        assert calls in (3, 4)  # of at most 3 of 10 or 9 tokens
