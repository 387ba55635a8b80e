"""Nothing in host memory grows with the number of steps, or of different sizes: training and sampling."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, OffloadCheckpoint, apply_context_parallel
from lightning_cp.fabric import ContextParallelStrategy
from tests.dist.lightning_ranks import fabric_of
from tests.harness import RankPool
from tests.harness.memory import settled_bytes
from tests.models.wan import wan

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
STEPS, WARM_UP, LIMIT_MB = 2000, 500, 5
_Step = Callable[[dict[str, Tensor]], object]


def _inputs(step: int) -> dict[str, Tensor]:
    """Inputs with one of 6,000 combinations of sizes, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    draw = random.Random(step)
    frames, height, width, text = (
        draw.randint(2, 4),
        2 * draw.randint(2, 11),
        2 * draw.randint(2, 11),
        draw.randint(4, 23),
    )
    return {
        "hidden_states": torch.randn(1, 4, frames, height, width, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, 16, generator=generator),
        "timestep": torch.tensor([draw.randrange(1000)]),
    }


def _training(rank: int, world: int) -> _Step:
    fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world))
    model: Any = wan().build().float().train()
    model.enable_gradient_checkpointing(gradient_checkpointing_func=OffloadCheckpoint(256))
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))

    def step(inputs: dict[str, Tensor]) -> None:
        fabric.backward(wrapped(**inputs, return_dict=False)[0].square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sampling(rank: int, world: int) -> _Step:
    model: Any = wan().build().float().eval()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))

    def step(inputs: dict[str, Tensor]) -> None:
        with torch.inference_mode():
            model(**inputs, return_dict=False)

    return step


def _grown_mb(rank: int, world: int, build: Callable[[int, int], _Step]) -> list[float]:
    """Resident memory every 250 steps, in MB above that after the warm-up."""
    step, held = build(rank, world), []
    for number in range(WARM_UP + STEPS):
        step(_inputs(number))
        if number >= WARM_UP - 1 and (number + 1 - WARM_UP) % 250 == 0:
            held.append(settled_bytes() / 1e6)
    return [x - held[0] for x in held]


@pytest.mark.parametrize("build", [_training, _sampling])
def test_memory_is_flat_over_steps_of_mixed_sizes(run_ranks: RankPool, build: Any) -> None:
    for grown in run_ranks(2, _grown_mb, build, init=build is _sampling, timeout_s=900):
        print("MB above the warm-up:", [round(x, 1) for x in grown])
        assert max(grown) < LIMIT_MB
