"""The harness of all distributed tests."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, RankPool


def _sum_of_ranks(rank: int, world: int, start: int) -> tuple[int, int, bool]:
    x = torch.tensor([start + rank])
    dist.all_reduce(x)
    os.environ["LEFT_BY_A_TEST"] = "1"
    torch.set_default_dtype(torch.float64)
    return int(x), os.getpid(), dist.get_world_size() == world


def _what_was_left(rank: int, world: int) -> tuple[bool, bool, torch.dtype, int]:
    return dist.is_initialized(), "LEFT_BY_A_TEST" in os.environ, torch.get_default_dtype(), torch.get_num_threads()


def _one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def _one_hangs(rank: int, world: int) -> None:
    if rank == 2:
        _wait_for_nothing()


def _wait_for_nothing() -> None:
    time.sleep(1000)


@pytest.mark.parametrize("world", [1, 3, 6])
def test_every_rank_runs_and_answers_in_rank_order(run_ranks: RankPool, world: int) -> None:
    total = 10 * world + sum(range(world))
    answers = run_ranks(world, _sum_of_ranks, 10)
    assert [(answer[0], answer[2]) for answer in answers] == [(total, True)] * world
    assert len({answer[1] for answer in answers}) == world


def test_workers_are_reused_but_a_call_leaves_no_state_to_the_next(run_ranks: RankPool) -> None:
    first = run_ranks(3, _sum_of_ranks, 0)
    assert run_ranks(3, _what_was_left, init=False) == [(False, False, torch.float32, 1)] * 3
    assert [answer[1] for answer in run_ranks(3, _sum_of_ranks, 0)] == [answer[1] for answer in first]


@pytest.mark.parametrize(
    ("function", "limit_s", "expected"),
    [(_one_raises, 150, r"rank 1 failed:(.|\n)*the cause"), (_one_hangs, 6, r"rank 2 hung(.|\n)*_wait_for_nothing")],
)
@pytest.mark.default(1)
def test_a_failing_rank_is_reported_and_the_pool_recovers(
    run_ranks: RankPool, function: object, limit_s: float, expected: str
) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match=expected):
        run_ranks(3, function, timeout_s=limit_s)  # type: ignore[arg-type]
    assert time.monotonic() - began < 500
    assert [answer[0] for answer in run_ranks(3, _sum_of_ranks, 1)] == [6] * 3
