"""Components and results that differ on one rank of a sample: one error on all ranks, in this call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.errors import CallFailedError, PeerMismatchError
from tests.harness import RankPool
from tests.pipelines import PIPES

_STEPS = 3
_SCALED = 1.5


def _shift(module: Any) -> None:
    with torch.no_grad():
        list(module.parameters())[-1].add_(0.5)


def _change(pipe: Any, what: str) -> None:
    """Change a component of one rank."""
    if what in ("transformer", "vae", "text_encoder"):
        _shift(getattr(pipe, what))
    elif what == "data":  # has no version
        pipe.transformer.x_embedder.weight.data.mul_(_SCALED)
    elif what == "block":
        del pipe.transformer.transformer_blocks[-1]
    elif what == "dtype":
        pipe.vae.to(torch.float64)
    elif what == "scheduler":
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    elif what == "sigmas":
        pipe.scheduler.set_shift(5.0)  # is not in the configuration
    elif what == "tiling":
        pipe.vae.enable_tiling()
    elif what == "tokenizer":
        pipe.tokenizer = copy.deepcopy(pipe.tokenizer)  # other pipelines use it too
        pipe.tokenizer.model_max_length = 3


_WEIGHTS = "must have equal weights, but "
_COMPONENTS = "must call the pipeline with equal arguments and components, but "
BEFORE = {
    "transformer": f"{_WEIGHTS}the values of transformer.",
    "vae": f"{_WEIGHTS}the values of vae.",
    "text_encoder": f"{_WEIGHTS}the values of text_encoder.",
    "data": f"{_WEIGHTS}the values of transformer.x_embedder.weight differ",
    "block": f"{_WEIGHTS}transformer.transformer_blocks.1.",
    "dtype": f"{_WEIGHTS}vae.encoder.conv_in.weight is (4, 3, 3, 3) torch.float64 on one and",
    "scheduler": f"{_COMPONENTS}scheduler['config']['shift'] has 5.0 on one and ",
    "sigmas": " differ",  # arguments of a forward with a ring, otherwise the result
    "tiling": f"{_COMPONENTS}vae['use_tiling'] has True on one and False on the other",
    "tokenizer": f"{_COMPONENTS}tokenizer['model_max_length'] has 3 on one and ",
}
_RESULT = "must compute the same, but the contents of result differ in a call of FluxPipeline (rank 1"


def _call(pipe: Any, **others: Any) -> str:
    """The error of a call; "" without one."""
    inputs = PIPES["flux_true_cfg"].inputs() | {"num_inference_steps": _STEPS, "output_type": "latent"}
    try:
        pipe(**inputs, **others, generator=torch.Generator().manual_seed(7))
    except (PeerMismatchError, CallFailedError) as error:
        return str(error)
    return ""


def _parallel(pipeline: Any, ring: int = 1, **degrees: int) -> Any:
    parallelize_pipeline(pipeline, ContextParallelConfig(ring_degree=ring), **degrees)
    return pipeline


def _before(rank: int, world: int, degrees: dict[str, int], whats: list[str]) -> dict[str, str]:
    """The errors of changes on rank 1 before a pipeline is made parallel."""
    found = {}
    for what in whats:
        pipe = PIPES["flux_true_cfg"].pipe()
        if rank == 1:
            _change(pipe, what)
        try:
            _parallel(pipe, **degrees)
        except (PeerMismatchError, CallFailedError) as error:
            found[what] = str(error)
        else:
            found[what] = _call(pipe)
    return found


@pytest.mark.parametrize(
    ("world", "degrees", "whats"),
    [
        (2, {"cfg": 2}, ["transformer", "data", "dtype", "scheduler", "sigmas", "tokenizer"]),
        (3, {"ring": 3}, ["text_encoder", "block", "sigmas", "tiling"]),
        (2, {"pipe": 2}, ["transformer", "vae", "scheduler"]),
    ],
)
@pytest.mark.default("degrees1")
def test_a_component_of_one_rank_that_differs(
    run_ranks: RankPool, world: int, degrees: dict[str, int], whats: list[str]
) -> None:
    for found in run_ranks(world, _before, degrees, whats):
        for what in whats:
            assert BEFORE[what] in found[what]


def _during(rank: int, world: int, degrees: dict[str, int]) -> list[str]:
    """The errors of calls: as usual, changed by a callback from a step on, as usual, with later weights."""
    pipe = _parallel(PIPES["flux_true_cfg"].pipe(), **degrees)
    found = [_call(pipe)]
    for first in (0, _STEPS - 1):  # a callback makes changes in all steps from one on

        def change(pipe: Any, step: int, t: Any, given: dict[str, Any], first: int = first) -> dict[str, Any]:
            return {"latents": given["latents"] * _SCALED} if rank == 1 and step >= first else {}

        found += [_call(pipe, callback_on_step_end=change), _call(pipe)]
    if rank == 1:
        _change(pipe, "transformer")
    return [*found, _call(pipe)]


@pytest.mark.parametrize(("world", "degrees"), [(3, {"ring": 3}), (2, {"cfg": 2}), (2, {"pipe": 2})])
@pytest.mark.full
def test_a_call_that_differs_raises_and_the_next_one_does_not(
    run_ranks: RankPool, world: int, degrees: dict[str, int]
) -> None:
    for usual, early, again, late, once_more, weights in run_ranks(world, _during, degrees):
        assert usual == again == once_more == ""
        assert ("the contents of hidden_states differ" if "ring" in degrees else _RESULT) in early
        assert _RESULT in late
        assert BEFORE["transformer"] in weights
