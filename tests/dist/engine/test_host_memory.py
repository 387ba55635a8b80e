"""Nothing in host memory grows with the number of steps, or of different sizes: training and sampling."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, OffloadCheckpoint, apply_context_parallel, parallelize_pipeline
from lightning_cp.engine.apply import installed_on
from lightning_cp.fabric import ContextParallelStrategy
from tests.dist.lightning_ranks import fabric_of
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool
from tests.harness.memory import settled_bytes
from tests.models.wan import wan
from tests.pipelines import PIPES

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
STEPS, WARM_UP, LIMIT_MB = 750, 250, 5
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


def _most_lengths(rank: int, world: int) -> int:
    """Largest number of lengths that a session has stored, over forwards of 300 lengths."""
    model = Plain()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAIN_PLAN)
    session, most = installed_on(model).session, 0
    for tokens in range(10, 310):
        model(torch.randn(1, tokens, 16, generator=torch.Generator().manual_seed(tokens)))
        most = max(most, len(session.derivable_sizes))
    return most


def test_a_session_stores_a_limited_number_of_lengths(run_ranks: RankPool) -> None:
    """A plan that does not describe attention needs to know for each length whether sizes can be derived."""
    assert run_ranks(3, _most_lengths) == [256] * 3


def _pipeline(rank: int, world: int) -> _Step:
    pipe: Any = PIPES["wan"].make()
    pipe.set_progress_bar_config(disable=True)
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))

    def step(inputs: dict[str, Tensor]) -> None:
        *_, height, width = inputs["hidden_states"].shape
        settings = {"num_inference_steps": 2, "guidance_scale": 4.0, "output_type": "latent", "max_sequence_length": 24}
        words = " ".join(["cat"] * (inputs["encoder_hidden_states"].shape[1] // 2))
        generator = torch.Generator().manual_seed(0)
        pipe(words, height=8 * height, width=8 * width, num_frames=5, generator=generator, **settings)

    return step


def _grown_mb(rank: int, world: int, build: Callable[[int, int], _Step]) -> list[float]:
    """Resident memory every 250 steps, in MB above that after the warm-up."""
    step, held = build(rank, world), []
    for number in range(WARM_UP + STEPS):
        step(_inputs(number))
        if number >= WARM_UP - 1 and (number + 1 - WARM_UP) % 250 == 0:
            held.append(settled_bytes() / 1e6)
    return [x - held[0] for x in held]


@pytest.mark.parametrize("build", [_training, _pipeline])
def test_memory_is_flat_over_steps_of_mixed_sizes(run_ranks: RankPool, build: Any) -> None:
    for grown in run_ranks(2, _grown_mb, build, init=build is not _training, timeout_s=900):
        print("MB above the warm-up:", [round(x, 1) for x in grown])
        assert max(grown) < LIMIT_MB
