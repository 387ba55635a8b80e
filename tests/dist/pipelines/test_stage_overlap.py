"""Stages of blocks begin a step before the step before is complete everywhere; the result stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.errors import CallFailedError, PeerMismatchError
from lightning_cp.pipelines import parallel_pipeline
from lightning_cp.pipelines.lazy_tensor import LazyTensor
from lightning_cp.pipelines.pipefusion.results import StageResults
from lightning_cp.undoable import intercept_calls, intercept_method
from tests.dist.compare import of_first_rank
from tests.dist.pipefusion import latents_of, make_pipe
from tests.harness import RankPool
from tests.harness.cases import and_others
from tests.pipelines.tiny import error_of

_STEPS = 6
_PROMPTS = ["a red cat", "a small dog in the snow", "a house"]
_BOTH = {"prompt": _PROMPTS, "negative_prompt": _PROMPTS}


def _pipe(name: str, scheduler: str) -> Any:
    pipe = make_pipe(name)
    if scheduler:
        kind = getattr(diffusers, scheduler)
        more = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"} if name == "wan" else {}
        pipe.scheduler = kind.from_config(pipe.scheduler.config, **more)
    return pipe


def _results(pipe: Any) -> StageResults:
    state = parallel_pipeline(pipe)
    assert state is not None
    (results,) = {calls.results for calls in state.patch_runners.values()}
    assert results is not None
    return results


# Changes of the model's output after which each patch depends on all of it.
_MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "views": lambda x: torch.cat([x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], dim=1),
    "comparison": lambda x: x * (x > 0).to(x.dtype).mean(),
    "mean": lambda x: x * x.mean(dim=1, keepdim=True),
    "product": lambda x: torch.einsum("st,bsc->btc", x.new_ones(x.shape[1], x.shape[1]).tril() / x.shape[1], x),
    "dtype": lambda x: x.view(torch.int64).flip(1).view(x.dtype),  # a view that has other labels
}


def _change_output(pipe: Any, change: Callable[[Tensor], Tensor]) -> None:
    def around(call: Any, args: Any, kwargs: Any) -> Any:
        output, *others = args
        return call(change(output), *others, **kwargs)

    intercept_method(pipe.scheduler, "step", around)


def _compare(
    rank: int, world: int, name: str, scheduler: str, degrees: Any, settings: Any, inputs: Any, mixing: str
) -> dict[str, Any]:
    """Errors of two calls against one process with the same patches, and how often the stages waited in each."""
    pipes = {where: _pipe(name, scheduler) for where in ("alone", "staged")}
    if settings.get("patches", 1) > 1:
        parallelize_pipeline(pipes["alone"], ContextParallelConfig(mesh=None), patches=settings["patches"])
    parallelize_pipeline(pipes["staged"], ContextParallelConfig(**degrees), **settings)
    if mixing:
        for pipe in pipes.values():
            _change_output(pipe, _MIXING[mixing])
    inputs = {**inputs, "num_inference_steps": _STEPS}
    torch.manual_seed(5)  # for schedulers that draw noise, if the pipeline gives them no generator
    expected, errors = of_first_rank(lambda: latents_of(pipes["alone"], name, **inputs)), []
    results = _results(pipes["staged"])
    waits = []
    for _ in range(2):  # the first one finds out which pieces results have
        torch.manual_seed(5)
        before = results.waits
        errors.append(error_of(expected, latents_of(pipes["staged"], name, **inputs)))
        waits.append(results.waits - before)
    return {"errors": errors, "waits": waits}


# name, scheduler, ranks, degrees, settings, arguments, number of times that the stages wait in a call
_CASES = {
    "flux": ("flux", "", 3, {}, {"pipe": 3, "patches": 3}, {}, 2),
    "wan_unipc": ("wan", "UniPCMultistepScheduler", 2, {}, {"pipe": 2, "patches": 3}, {}, 2),
    "ulysses": ("flux", "", 4, {"ulysses_degree": 2}, {"pipe": 2, "patches": 3}, {}, 2),
    "z_image": ("z_image", "", 2, {}, {"pipe": 2, "patches": 2}, {}, _STEPS),  # it refines image tokens first
    "cfg_batch": ("sd3", "", 4, {}, {"pipe": 2, "cfg": 2, "patches": 3}, {}, 2),
    "cfg_three_stages": ("flux_true_cfg", "", 6, {}, {"pipe": 3, "cfg": 2, "patches": 3}, {}, 2),
}


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.full
def test_stages_do_not_wait_between_steps_and_the_result_is_the_same(run_ranks: RankPool, case: str) -> None:
    name, scheduler, world, degrees, settings, inputs, waits = _CASES[case]
    for found in run_ranks(world, _compare, name, scheduler, degrees, settings, inputs, ""):
        assert max(found["errors"]) < 1e-12
        assert found["waits"] == [min(waits + 1, _STEPS), waits]


# Schedulers that add noise, call the model twice a step, use former steps, or change results in place.
_SCHEDULERS = (
    *(
        ("pixart_alpha", f"{name}Scheduler")
        for name in ("EulerAncestralDiscrete", "HeunDiscrete", "LMSDiscrete", "LCM")
    ),
    *(
        ("pixart_alpha", "PNDMScheduler"),
        ("pixart_alpha", "SASolverScheduler"),
        ("wan", "FlowMatchHeunDiscreteScheduler"),
    ),
)
_WAITS = {"PNDMScheduler": 8, "SASolverScheduler": _STEPS}  # they change results in place; PNDM makes 15 calls


@pytest.mark.full
@pytest.mark.parametrize("waits", [False, True])
def test_other_schedulers_give_the_same_result(run_ranks: RankPool, waits: bool) -> None:
    for name, scheduler in (x for x in _SCHEDULERS if (x[1] in _WAITS) == waits):
        for found in run_ranks(2, _compare, name, scheduler, {}, {"pipe": 2, "patches": 2}, {}, ""):
            assert max(found["errors"]) < 1e-12, scheduler
            assert found["waits"] == ([_WAITS[scheduler]] * 2 if waits else [3, 2]), scheduler


@pytest.mark.parametrize("mixings", and_others(_MIXING))
@pytest.mark.default(1)
def test_stages_wait_if_a_scheduler_mixes_patches(run_ranks: RankPool, mixings: list[str]) -> None:
    for mixing in mixings:
        for found in run_ranks(3, _compare, "flux", "", {}, {"pipe": 3, "patches": 3}, {}, mixing):
            assert max(found["errors"]) < 1e-12, mixing
            assert found["waits"] == [_STEPS, _STEPS], mixing


def _operator_for_each_branch(rank: int, world: int) -> list[float]:
    """Errors of pipelines that apply an operator to the latents before each branch's call of the transformer."""

    def halved(call: Any, args: Any, kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "hidden_states": kwargs["hidden_states"] * 0.5})

    errors = []
    for patches in (1, 3):
        alone, staged = make_pipe("flux_true_cfg"), make_pipe("flux_true_cfg")
        parallelize_pipeline(alone, ContextParallelConfig(mesh=None), patches=patches)
        parallelize_pipeline(staged, ContextParallelConfig(), patches=patches, pipe=world)
        for pipe in (alone, staged):
            intercept_calls(pipe.transformer, halved)
        expected = latents_of(alone, "flux_true_cfg")
        errors += [error_of(expected, latents_of(staged, "flux_true_cfg")) for _ in range(2)]
    return errors


@pytest.mark.full
def test_operators_between_the_branches_of_a_step_are_computed_before_they_are_read(run_ranks: RankPool) -> None:
    for errors in run_ranks(3, _operator_for_each_branch):
        assert max(errors) < 1e-12


def _with_callback(rank: int, world: int) -> dict[str, Any]:
    """A callback that changes the latents of each step, on stages and in one process; one that raises on one rank."""
    pipes, seen = {where: make_pipe("flux") for where in ("alone", "staged")}, []

    def change(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        seen.append(isinstance(values["latents"], LazyTensor))
        return {"latents": values["latents"] * 0.9}

    def fail(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == _STEPS // 2 and rank == 1:
            raise ValueError("no disk")
        return values

    parallelize_pipeline(pipes["alone"], ContextParallelConfig(mesh=None), patches=3)
    parallelize_pipeline(pipes["staged"], ContextParallelConfig(), patches=3, pipe=world)
    settings = {"num_inference_steps": _STEPS, "callback_on_step_end": change}
    expected = latents_of(pipes["alone"], "flux", **settings)
    results, errors = _results(pipes["staged"]), []
    for _ in range(2):
        before = results.waits
        errors.append(error_of(expected, latents_of(pipes["staged"], "flux", **settings)))
    waits = results.waits - before
    with pytest.raises((ValueError, CallFailedError), match="no disk"):
        latents_of(pipes["staged"], "flux", num_inference_steps=_STEPS, callback_on_step_end=fail)
    errors.append(error_of(expected, latents_of(pipes["staged"], "flux", **settings)))
    return {"errors": errors, "waits": waits, "lazy": any(seen)}


def test_a_callback_after_each_step_gets_its_latents_and_may_raise(run_ranks: RankPool) -> None:
    for found in run_ranks(3, _with_callback):
        assert max(found["errors"]) < 1e-12
        assert found["waits"] == _STEPS
        assert not found["lazy"]


def _outside(rank: int, world: int) -> tuple[float, str]:
    """Calls of the transformer outside of a call of its pipeline: the error, and what unequal arguments raise."""
    pipes, calls = {where: make_pipe("flux") for where in ("alone", "staged")}, list[dict[str, Any]]()

    def record(call: Any, args: Any, kwargs: Any) -> Any:
        calls.append(kwargs)
        return call(*args, **kwargs)

    undo = intercept_calls(pipes["alone"].transformer, record)
    latents_of(pipes["alone"], "flux")
    undo()
    parallelize_pipeline(pipes["staged"], ContextParallelConfig(), pipe=2, cfg=2)
    arguments = calls[0]
    with torch.no_grad():
        expected, found = (pipe.transformer(**arguments)[0] for pipe in pipes.values())
        with pytest.raises(PeerMismatchError) as error:
            pipes["staged"].transformer(**{**arguments, "timestep": arguments["timestep"] + rank // 2})
    return error_of(expected, found), str(error.value)


def test_a_call_outside_of_the_pipeline_is_computed_by_one_branch_from_equal_arguments(run_ranks: RankPool) -> None:
    for error, text in run_ranks(4, _outside):
        assert error < 1e-12
        assert "must call FluxTransformer2DModel with equal arguments, but the contents of timestep differ" in text
