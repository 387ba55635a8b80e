"""Each feature on the strict stand-in for NCCL: no hang, and no buffer is read or written before its transfer is done.

Ranks run one operation at a time (`serial`), and backward in a thread of its own, as on CUDA.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from tests.dist.attention.test_exactness import problems
from tests.dist.pipefusion import latents_of, make_pipe
from tests.dist.pipelines.test_pipe_stages import _failing
from tests.dist.problems import check_exact
from tests.dist.strategies.test_training import CASES, expected_weights, fit
from tests.harness import RankPool
from tests.harness.strict import Strict
from tests.pipelines.tiny import error_of

_STRICT = Strict(serial=True, backward_thread=True)
_MODES = [(3, 3, 1, "allgather"), (3, 1, 3, "allgather"), (6, 3, 2, "alltoall"), (4, 4, 1, "grid 2x2")]


@pytest.mark.parametrize(("world", "ring", "ulysses", "rotate"), _MODES)
@pytest.mark.default(1)
def test_attention(run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str) -> None:
    cases = list(islice(problems(ring, ulysses, rotate), 0, None, 11 if world == 3 else 3))
    assert [x for lines in run_ranks(world, check_exact, cases, strict=_STRICT) for x in lines] == []


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["shares and data", "sharded, replicated"])
def test_ddp_and_fsdp2(run_ranks: RankPool, case: str) -> None:
    flavour, kind, world, settings, options = CASES[case]
    found = run_ranks(world, fit, flavour, kind, settings, options, init=False, strict=_STRICT)
    start, expected = expected_weights(found, options)
    for one in found:
        assert (one.weights - expected).norm() < 1e-4 * (expected - start).norm()


def _sample(rank: int, world: int, name: str, degrees: Any, settings: Any, inputs: Any) -> float:
    """The largest error of some calls against one process, which find out that steps can overlap, and do so."""
    pipes = {where: make_pipe(name) for where in ("alone", "parallel")}
    if settings.get("patches", 1) > 1:
        parallelize_pipeline(pipes["alone"], ContextParallelConfig(mesh=None), patches=settings["patches"])
    parallelize_pipeline(pipes["parallel"], ContextParallelConfig(**degrees), **settings)
    expected = latents_of(pipes["alone"], name, **inputs)
    calls = 3 if "pipe" in settings else 1
    return max(error_of(expected, latents_of(pipes["parallel"], name, **inputs)) for _ in range(calls))


_PIPELINES: dict[str, tuple[str, int, Any, Any, Any]] = {
    "patches": ("flux", 3, {}, {"pipe": 3, "patches": 3}, {}),
    "ring": ("flux", 6, {"ring_degree": 2}, {"pipe": 3, "patches": 3}, {}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", _PIPELINES)
def test_sampling(run_ranks: RankPool, case: str) -> None:
    name, world, degrees, settings, inputs = _PIPELINES[case]
    for error in run_ranks(world, _sample, name, degrees, settings, inputs, strict=_STRICT):
        assert error < 1e-12


@pytest.mark.full
def test_a_stage_that_fails_leaves_no_rank_waiting(run_ranks: RankPool) -> None:
    for raised, errors in run_ranks(3, _failing, "flux", {"patches": 3}, {}, [5], strict=_STRICT):
        assert len(raised) == 3
        assert errors == [0] * 3
