"""ControlNets of a parallel pipeline: all ranks that share a sample compute them, and vote before each call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_cp import apply_context_parallel, parallelize_pipeline
from lightning_cp.errors import CallFailedError, PlanError
from tests import features
from tests.dist.compare import of_first_rank
from tests.harness import RankPool
from tests.models.controlnets import TINY as CONTROLNETS
from tests.models.modes import MODES
from tests.pipelines import PIPES
from tests.pipelines.tiny import error_of

_TOKENS = 15


def _shared(
    rank: int, world: int, name: str, mode: str, cfg: int, settings: dict[str, Any]
) -> list[tuple[float, list[int]]]:
    """For each of two calls: the error, and the image tokens in the blocks of this rank's ControlNets."""
    pipe = PIPES[name].pipe()
    alone = of_first_rank(lambda: PIPES[name].draw(pipe))
    parallelize_pipeline(pipe, MODES[mode](world // cfg), cfg=cfg, **settings)
    counts: list[int] = []

    def count(block: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        counts.append(output[1].shape[1])

    nets = getattr(pipe.controlnet, "nets", [pipe.controlnet])
    for net in nets:
        net.transformer_blocks[-1].register_forward_hook(count)
    found = []
    for _ in range(2):
        counts.clear()
        found.append((error_of(alone, PIPES[name].draw(pipe)), list(counts)))
    return found


@pytest.mark.parametrize(
    ("world", "name", "mode", "cfg", "settings"),
    [
        (3, "flux_controlnet", "ulysses", 1, {"shares": (1, 3, 2)}),
        (4, "flux_two_controlnets", "ulysses", 2, {}),
        (4, "flux_controlnet", "ring", 2, {"shard": ("controlnet", "transformer")}),
        (4, "flux_two_controlnets", "unified", 1, {"shares": (4, 1, 2, 1)}),
    ],
)
@pytest.mark.default(1)
def test_all_ranks_of_a_sample_divide_the_tokens_of_controlnets(
    run_ranks: RankPool, world: int, name: str, mode: str, cfg: int, settings: dict[str, Any]
) -> None:
    by_rank = run_ranks(world, _shared, name, mode, cfg, settings)
    shares = settings.get("shares", (1,))
    for rank, trials in enumerate(by_rank):
        expected = _TOKENS * shares[rank % len(shares)] * len(shares) / (sum(shares) * world)
        assert all(abs(n - expected) <= 1 for _, counts in trials for n in counts), "tokens by shares"
    for trials in zip(*by_rank, strict=True):
        for error, _ in trials:
            assert error <= 1e-5
            features.compared("ControlNets", error)
        calls = list(zip(*(counts for _, counts in trials), strict=True))
        assert calls
        assert {sum(counts) for counts in calls} == {_TOKENS}, "each token once, over all branches of guidance"


def _failed(rank: int, world: int) -> tuple[str, float]:
    """What is raised if rank 1 fails before the first call of the ControlNet; the error of the next call."""
    tiny = PIPES["flux_controlnet"]
    pipe = tiny.pipe()
    alone = of_first_rank(lambda: tiny.draw(pipe))
    parallelize_pipeline(pipe, MODES["ring"](world))
    prepare = pipe.prepare_latents
    if rank == 1:
        pipe.prepare_latents = _fail
    with pytest.raises(OSError if rank == 1 else CallFailedError) as error:
        tiny.draw(pipe)
    pipe.prepare_latents = prepare
    return str(error.value), error_of(alone, tiny.draw(pipe))


def _fail(*_: object, **__: object) -> None:
    raise OSError("disk of rank 1")


def test_a_rank_that_fails_before_a_controlnet_ends_the_call_on_all(run_ranks: RankPool) -> None:
    for said, error in run_ranks(3, _failed):
        assert "disk of rank 1" in said
        assert error <= 1e-5


def test_a_controlnet_with_layers_that_run_twice_is_refused() -> None:
    tiny = CONTROLNETS["control_z_image"]
    tiny = replace(tiny, config={**tiny.config, "add_control_noise_refiner": "control_layers"})
    with pytest.raises(PlanError, match="cannot run context-parallel: its control layers run twice"):
        apply_context_parallel(tiny.build(), MODES["ring"](1))
