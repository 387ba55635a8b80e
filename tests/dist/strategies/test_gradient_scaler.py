"""Gradient scaling of 16-mixed: an overflow on one rank skips the step on all of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor
from typing_extensions import override

from tests.dist.lightning_ranks import BY_PLAN, STRATEGIES, distance, fabric_of, flat
from tests.dist.module import Mixed, inputs
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
_OVERFLOWS = {1, 4}  # steps


class _Scaled(MixedPrecision):
    """The scaler of 16-mixed, without autocast: gradients can then be compared exactly."""

    @override
    def forward_context(self) -> Any:
        return nullcontext()

    @override
    def convert_input(self, data: Any) -> Any:
        return data


def _overflow(module: Any, args: Any, output: Any) -> None:
    (output if isinstance(output, Tensor) else output[0]).register_hook(lambda grad: grad * torch.inf)


def _trained(
    rank: int, world: int, kind: str, clip: dict[str, Any], settings: dict[str, Any]
) -> list[tuple[Tensor, float]]:
    """Return weights and scale after each step. Rank 1 overflows; rank -1 is one process without a strategy."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    precision, model = _Scaled("16-mixed", "cpu", scaler), Mixed()
    if rank < 0:
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])
    else:
        strategy = STRATEGIES["fabric", kind](**{"ring": world, **BY_PLAN, **settings})
        fabric = fabric_of(rank, world, strategy, plugins=[precision])
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5))
    found: list[tuple[Tensor, float]] = []
    for step in range(6):
        hook = model.plain.blocks[1].register_forward_hook(_overflow)
        if rank not in (-1, 1) or step not in _OVERFLOWS:
            hook.remove()
        fabric.backward(wrapped(inputs()).square().mean())
        hook.remove()
        if clip:
            fabric.clip_gradients(wrapped, optimizer, error_if_nonfinite=False, **clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append((flat(model).clone(), scaler.get_scale()))
    return found


_NORM, _VALUE = {"max_norm": 0.01}, {"clip_val": 1e-3}


@pytest.mark.parametrize(
    ("kind", "world", "settings", "clip"),
    [("cp", 3, {}, _NORM), ("cp_fsdp", 2, {}, _VALUE), ("cp_fsdp", 4, {"ring": 2, "replicate": 2}, {})],
)
@pytest.mark.default(1)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    run_ranks: RankPool, kind: str, world: int, settings: dict[str, Any], clip: dict[str, Any]
) -> None:
    expected = _trained(-1, 1, kind, clip, {})
    assert [scale for _, scale in expected] == [1024, 512, 512, 1024, 512, 512]
    for found in run_ranks(world, _trained, kind, clip, settings, init=False):
        for step, ((weights, scale), (right, right_scale)) in enumerate(zip(found, expected, strict=True)):
            assert scale == right_scale, step
            assert distance(weights, right) < 1e-5, step
