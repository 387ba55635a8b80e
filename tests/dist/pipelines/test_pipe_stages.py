"""Stages of blocks: samples and branches of guidance as micro-batches, and errors on one stage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.errors import CallFailedError, PlanError
from lightning_cp.pipelines import parallel_pipeline
from lightning_cp.pipelines.pipefusion.runner import PatchRunner
from lightning_cp.undoable import Undo, intercept_calls, intercept_method, undo_all
from tests.dist.pipefusion import STEPS, latents_of, make_pipe
from tests.harness import RankPool
from tests.pipelines.tiny import error_of

_PROMPTS = ["a red cat", "a small dog in the snow", "a house"]


def _patch_runners(pipe: Any) -> list[PatchRunner]:
    state = parallel_pipeline(pipe)
    assert state is not None
    return list(state.patch_runners.values())


def _first_blocks(pipe: Any) -> list[nn.Module]:
    """Return the first block of this rank's stage of each transformer."""
    stages = [calls.stage for calls in _patch_runners(pipe) if calls.stage is not None]
    return [stage.blocks[stage.range.start] for stage in stages]


@contextmanager
def _counted(pipe: Any) -> Iterator[dict[str, int]]:
    """Counts the votes, the times that all stages wait, and this rank's forwards of its own first block."""
    state, found = parallel_pipeline(pipe), {"votes": 0, "waits": 0, "forwards": 0}
    assert state is not None
    calls = next(iter(state.patch_runners.values()))
    assert calls.results is not None
    vote, before = state.votes._vote, calls.results.waits

    def count_vote(value: int) -> list[int]:
        found["votes"] += 1
        return vote(value)

    def count_forward(call: Any, args: Any, kwargs: Any) -> Any:
        found["forwards"] += 1
        return call(*args, **kwargs)

    undo = [intercept_calls(block, count_forward) for block in _first_blocks(pipe)]
    state.votes._vote = count_vote  # type: ignore[method-assign]
    yield found
    state.votes._vote = vote  # type: ignore[method-assign]
    found["waits"] = calls.results.waits - before
    undo_all(undo)


def _compare(rank: int, world: int, name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Four calls, and one of another size, against one process without stages; the fourth call is counted."""
    other = {"height": 20, "width": 12} if name.startswith("flux") else {}
    plain = make_pipe(name)
    expected, small = latents_of(plain, name, **inputs), latents_of(plain, name, **inputs, **other)
    pipe = make_pipe(name)
    parallelize_pipeline(pipe, ContextParallelConfig(), **settings)
    found = latents_of(pipe, name, **inputs)
    for _ in range(2):  # they find out which steps can overlap, one transformer call of a step at a time
        latents_of(pipe, name, **inputs)
    with _counted(pipe) as counts:
        again = latents_of(pipe, name, **inputs)
    return {
        "error": error_of(expected, found),
        "again": error_of(found, again),
        "small": error_of(small, latents_of(pipe, name, **inputs, **other)),
        **counts,
    }


# name, ranks, settings, arguments, forwards of a step, number of times that the stages wait in a call
_CASES = {
    "prompts": ("flux", 3, {"pipe": 3}, {"prompt": _PROMPTS}, 3, 1),
    "branches": ("flux_true_cfg", 3, {"pipe": 3}, {}, 2, STEPS),
    "prompts_and_branches": ("flux_true_cfg", 2, {"pipe": 2}, {"prompt": _PROMPTS, "negative_prompt": _PROMPTS}, 6, 1),
    "branches_and_cfg": ("sd3", 4, {"pipe": 2, "cfg": 2}, {"prompt": _PROMPTS[:2]}, 2, 1),
    "wan_two_experts": ("wan_two_experts", 2, {"pipe": 2}, {}, 2, STEPS),
    "controlnet": ("flux_controlnet", 3, {"pipe": 3}, {"prompt": _PROMPTS[:2]}, 4, STEPS),
}
_VOTES = 4  # at the start and the end of a call, before its first step, and before its result is compared


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.default(1)
def test_micro_batches_are_exact_and_stages_wait_at_most_once_a_step(run_ranks: RankPool, case: str) -> None:
    name, world, settings, inputs, forwards, waits = _CASES[case]
    for found in run_ranks(world, _compare, name, settings, inputs):
        assert found["error"] < 1e-12
        assert found["again"] == 0
        assert found["small"] < 1e-12
        assert (found["forwards"], found["waits"]) == (forwards * STEPS, waits)
        controlnets = 2 * STEPS if name == "flux_controlnet" else 0  # it reads the latents of each step
        assert found["votes"] == _VOTES + waits + controlnets


def _fail_once(at: int, calls: list[int], call: Any, args: Any, kwargs: Any) -> Any:
    calls.append(len(calls))
    if len(calls) - 1 == at:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return call(*args, **kwargs)


def _failing(rank: int, world: int, name: str, settings: dict[str, Any], inputs: dict[str, Any], at: list[int]) -> Any:
    """Each rank fails once in each of some forwards of its stage: what is raised, and the errors of the next calls."""
    pipe = make_pipe(name)
    stages = world // settings.get("cfg", 1)
    parallelize_pipeline(pipe, ContextParallelConfig(), pipe=stages, **settings)
    state = parallel_pipeline(pipe)
    assert state is not None
    raised, latents = list[tuple[str, str]](), list[Tensor]()
    for forward in at:
        for failing in range(world):
            fail, undo = partial(_fail_once, forward, []), list[Undo]()
            if rank == failing:
                undo = [intercept_calls(block, fail) for block in _first_blocks(pipe)]
            with pytest.raises((torch.OutOfMemoryError, CallFailedError)) as error:
                latents_of(pipe, name, **inputs)
            undo_all(undo)
            raised.append((type(error.value).__name__, str(error.value)))
            latents.append(latents_of(pipe, name, **inputs))
    assert state.votes.broken is None
    fresh = make_pipe(name)
    parallelize_pipeline(fresh, ContextParallelConfig(), pipe=stages, **settings)
    expected = latents_of(fresh, name, **inputs)
    return raised, [error_of(expected, x) for x in latents]


@pytest.mark.parametrize(
    ("world", "name", "settings", "inputs", "at"),
    [
        pytest.param(3, "flux", {"patches": 3}, {}, [0, 5], id="patches"),  # of 1 + 3 * 3
        pytest.param(3, "flux", {}, {"prompt": _PROMPTS}, [0, 2, 4], id="samples"),
        pytest.param(2, "wan_two_experts", {"patches": 2}, {}, [4, 7], id="experts"),
        pytest.param(4, "sd3", {"patches": 3, "cfg": 2}, {}, [1, 7], id="cfg"),
    ],
)
@pytest.mark.default("patches")
def test_a_stage_that_runs_out_of_memory_ends_the_call_on_all_by_name(
    run_ranks: RankPool, world: int, name: str, settings: dict[str, Any], inputs: dict[str, Any], at: list[int]
) -> None:
    found = run_ranks(world, _failing, name, settings, inputs, at)
    for rank, (raised, errors) in enumerate(found):
        for i, (kind, text) in enumerate(raised):
            if i % world == rank:
                assert (kind, text) == ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")
            else:
                assert kind == "CallFailedError"
                assert re.search(
                    rf"rank {i % world} failed in this call of \w+Pipeline: OutOfMemoryError: CUDA out of memory", text
                )
        assert errors == [0] * len(errors)


def _branches_with_keys(rank: int, world: int, name: str, settings: dict[str, Any]) -> list[int]:
    """Number of branches whose keys each transformer holds on this rank at the end of a call."""
    pipe, found = make_pipe(name), list[int]()
    parallelize_pipeline(pipe, ContextParallelConfig(), patches=2, **settings)
    runners = _patch_runners(pipe)
    end = runners[0].end

    def count() -> None:
        found.extend(sum(bool(x.evaluation.buffers) for x in one.branches.known.values()) for one in runners)
        end()

    runners[0].end = count  # type: ignore[method-assign]
    latents_of(pipe, name)
    return found


@pytest.mark.parametrize(
    ("name", "settings", "branches"),
    [
        pytest.param("wan_two_experts", {"pipe": 2}, [0, 2], id="an expert frees the keys of the one before"),
        pytest.param("wan", {"cfg": 2}, [1], id="a CFG rank keeps those of its branch"),
    ],
)
@pytest.mark.default(1)
def test_a_rank_keeps_no_more_keys_than_it_needs(
    run_ranks: RankPool, name: str, settings: dict[str, Any], branches: list[int]
) -> None:
    assert run_ranks(2, _branches_with_keys, name, settings) == [branches, branches]


def _failing_between_calls(rank: int, world: int) -> list[str]:
    """The scheduler fails on the last stage, while the first one has begun the next step: two calls."""
    pipe, said = make_pipe("flux_true_cfg"), []
    parallelize_pipeline(pipe, ContextParallelConfig(), pipe=world, patches=2)
    for _ in range(2):
        latents_of(pipe, "flux_true_cfg")  # from now on, steps overlap
    undo = []
    if rank == world - 1:
        undo = [intercept_method(pipe.scheduler, "step", partial(_fail_once, 2, []))]
    for _ in range(2):
        with pytest.raises((torch.OutOfMemoryError, CallFailedError, RuntimeError)) as error:
            latents_of(pipe, "flux_true_cfg")
        said.append(f"{type(error.value).__name__}: {error.value}")
    undo_all(undo)
    return said


def test_after_an_error_with_pending_transfers_further_calls_are_refused(run_ranks: RankPool) -> None:
    for rank, (first, second) in enumerate(run_ranks(2, _failing_between_calls)):
        assert first.startswith("OutOfMemoryError" if rank == 1 else "CallFailedError: rank 1 failed in this call")
        assert "this FluxPipeline can make no further call" in second


def _starting_late(rank: int, world: int, patches: int) -> dict[str, float]:
    """Guidance from the third step on, which another branch then starts with a whole evaluation."""
    pipes = {name: make_pipe("hunyuan_image") for name in ("plain", "alone", "staged")}
    for pipe in pipes.values():
        for guider in (pipe.guider, pipe.ocr_guider):
            guider._start = 0.5
    parallelize_pipeline(pipes["alone"], ContextParallelConfig(), patches=patches)
    parallelize_pipeline(pipes["staged"], ContextParallelConfig(), patches=patches, pipe=world)
    found = {name: latents_of(pipe, "hunyuan_image") for name, pipe in pipes.items()}
    always = make_pipe("hunyuan_image")
    return {
        "late": error_of(latents_of(always, "hunyuan_image"), found["plain"]),
        "patches": error_of(found["plain"], found["alone"]),
        "error": error_of(found["alone"], found["staged"]),
        "again": error_of(found["staged"], latents_of(pipes["staged"], "hunyuan_image")),
    }


@pytest.mark.full
@pytest.mark.parametrize("patches", [1, 2])
def test_guidance_may_start_late(run_ranks: RankPool, patches: int) -> None:
    for found in run_ranks(3, _starting_late, patches):
        assert found["late"] > 1e-6
        assert (found["patches"] > 1e-9) == (patches > 1)
        assert found["error"] < 1e-12
        assert found["again"] == 0


def _skipping(rank: int, world: int) -> tuple[list[str], float]:
    """Skip a block in the middle of the first stage, then its last block; then a call without."""
    expected = latents_of(make_pipe("sd3"), "sd3")
    pipe, said = make_pipe("sd3"), []
    parallelize_pipeline(pipe, ContextParallelConfig(), pipe=[2, 1])
    for layer in (0, 1):
        with pytest.raises((PlanError, CallFailedError)) as error:
            latents_of(
                *(pipe, "sd3"),
                skip_guidance_layers=[layer],
                skip_layer_guidance_start=0.0,
                skip_layer_guidance_stop=1.0,
            )
        said.append(str(error.value))
    return said, error_of(expected, latents_of(pipe, "sd3"))


@pytest.mark.full
def test_skipped_blocks_are_refused(run_ranks: RankPool) -> None:
    for said, error in run_ranks(2, _skipping):
        assert all("skips blocks in this call" in text for text in said)
        assert error < 1e-12
