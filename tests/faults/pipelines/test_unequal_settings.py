"""Settings of parallelize_pipeline that differ between ranks, or that one rank refuses: an error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers import FirstBlockCacheConfig

from lightning_cp import ContextParallelConfig, parallelize_pipeline, unparallelize_pipeline
from lightning_cp.errors import CallFailedError, PeerMismatchError
from tests.dist.pipefusion import latents_of, make_pipe
from tests.harness import RankPool
from tests.pipelines.tiny import error_of


def _parallel(pipe: Any, settings: dict[str, Any]) -> None:
    given = dict(settings)
    names = ("ring_degree", "ulysses_degree", "rotate_method")
    degrees = {name: given.pop(name) for name in names if name in given}
    parallelize_pipeline(pipe, ContextParallelConfig(**degrees), **given)


def _raised(rank: int, world: int, one: dict[str, Any], other: dict[str, Any]) -> tuple[str, str, float]:
    """What unequal settings raise, and the error of the next call with equal ones."""
    pipe = make_pipe("flux")
    expected = latents_of(pipe, "flux")
    with pytest.raises((PeerMismatchError, CallFailedError, ValueError, TypeError)) as error:
        _parallel(pipe, one if rank == world - 1 else other)
    _parallel(pipe, {"ring_degree": world})
    found = error_of(expected, latents_of(pipe, "flux"))
    unparallelize_pipeline(pipe)
    return type(error.value).__name__, str(error.value), found


@pytest.mark.parametrize(
    ("one", "other", "name", "values"),
    [
        ({"pipe": 3, "patches": 2}, {"pipe": 3, "patches": 3}, "patches", ("3", "2")),
        ({"ring_degree": 3, "shard": ["transformer"]}, {"ring_degree": 3}, "shard", ("()", "['transformer']")),
        ({"ring_degree": 3, "rotate_method": "grid"}, {"ring_degree": 3}, "rotate_method", ("'allgather'", "'grid'")),
    ],
)
@pytest.mark.default("patches", "rotate_method")
def test_settings_that_differ_are_named_on_all_ranks(
    run_ranks: RankPool, one: dict[str, Any], other: dict[str, Any], name: str, values: tuple[str, str]
) -> None:
    for kind, text, error in run_ranks(3, _raised, one, other):
        assert kind == "PeerMismatchError"
        assert f"rank 0 has {name}={values[0]} and rank 2 has {name}={values[1]}" in text
        assert error < 1e-12


def test_a_setting_that_one_rank_refuses_is_an_error_on_all(run_ranks: RankPool) -> None:
    *others, (kind, text, error) = run_ranks(3, _raised, {"pipe": 3, "warmup": 0}, {"pipe": 3})
    assert kind == "ValueError"
    assert "warmup" in text
    assert error < 1e-12
    for kind, text, error in others:
        assert kind == "CallFailedError"
        assert "rank 2 cannot make the FluxPipeline parallel: ValueError: warmup" in text
        assert error < 1e-12


def _refused_later(rank: int, world: int, what: str) -> tuple[str, str, float]:
    """What ranks raise if one of them refuses its pipeline after groups were built, and the error of the next call."""
    pipe, settings = make_pipe("flux"), {"pipe": world}
    expected = latents_of(pipe, "flux")
    if rank == 1 and what == "kernel":
        settings |= {"kernel": "nonsense"}
    elif rank == 1:
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises((CallFailedError, ValueError)) as error:
        _parallel(pipe, settings)
    if rank == 1:
        pipe.transformer.disable_cache() if what == "cache" else None
    _parallel(pipe, {"ring_degree": world})
    return type(error.value).__name__, str(error.value), error_of(expected, latents_of(pipe, "flux"))


@pytest.mark.parametrize(("what", "text"), [("cache", "FirstBlockCache"), ("kernel", "nonsense")])
@pytest.mark.default(1)
def test_what_one_rank_refuses_later_is_an_error_on_all(run_ranks: RankPool, what: str, text: str) -> None:
    for rank, (kind, said, error) in enumerate(run_ranks(3, _refused_later, what)):
        assert (kind == "CallFailedError") == (rank != 1)
        assert text in said
        assert rank == 1 or "rank 1 failed in this call of FluxPipeline" in said
        assert error < 1e-12
