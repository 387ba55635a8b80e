"""A rank that does not join a collective while others wait: reported with rank, module and collective."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.comm import loopback, stall
from lightning_cp.comm.stall import watch_stalls
from tests.harness import RankPool
from tests.models import TINY

AFTER_S = 1.0
NAP_S = 2.5


def _told_while(step: Callable[[], object], *, world: int, after_s: float = AFTER_S) -> list[str]:
    """Reports of this rank's watch during a step."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    messages: list[str] = []
    watch = watch_stalls(host="127.0.0.1", after_s=after_s, timeout_s=60, report=messages.append)
    assert (watch is None) == (world == 1)
    step()
    dist.barrier()
    if watch is not None:
        watch.stop()
    return messages


def _wan(world: int, place: str, sleeps: bool) -> tuple[Any, Callable[[], object]]:
    tiny = TINY["wan"]
    model = tiny.build()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    arguments = tiny.arguments()

    def nap(*_: object) -> None:
        if sleeps:
            time.sleep(NAP_S)

    def backward_nap(_module: object, _inputs: object, output: Tensor) -> None:
        output.register_hook(nap)

    attention: Any = model.blocks[1].attn1
    attention.register_forward_pre_hook(nap) if place == "forward" else attention.register_forward_hook(backward_nap)

    def step() -> None:
        model(**arguments, return_dict=False)[0].sum().backward()

    return model, step


def _stalled(rank: int, world: int, place: str) -> list[str]:
    _, step = _wan(world, place, sleeps=rank == 1)
    return _told_while(step, world=world)


def test_a_stalled_forward_is_reported_by_every_waiting_rank(run_ranks: RankPool) -> None:
    first, sleeper, last = run_ranks(3, _stalled, "forward")
    assert sleeper == []
    for (told,) in (first, last):
        assert "has not ended for" in told
        assert "time-out: 60 s" in told
        assert "Pending.wait, blocks.1.attn1 of WanTransformer3DModel" in told
        assert "rank 1 is in no collective, blocks.1.attn1 of WanTransformer3DModel (dist/test_stall.py:" in told
        assert "in nap)" in told


def test_a_stalled_backward_is_reported_with_the_module_of_its_forward(run_ranks: RankPool) -> None:
    (told,), _, _ = run_ranks(3, _stalled, "backward")
    assert "in backward, blocks.1.attn1 of WanTransformer3DModel" in told
    assert "rank 1 is in no collective" in told


def _first_is_elsewhere(rank: int, world: int) -> list[str]:
    return _told_while(lambda: time.sleep(NAP_S if rank == 0 else 0), world=world)


def test_rank_zero_reports_peers_that_wait_for_it(run_ranks: RankPool) -> None:
    (first,), (other,) = run_ranks(2, _first_is_elsewhere)
    for told in (first, other):
        assert "rank 1 wait" in told
        assert "barrier" in told
        assert "rank 0 is in no collective (dist/test_stall.py:" in told


def _busy(rank: int, world: int) -> list[str]:
    """Collectives that take all the time, but end: the same lines again and again."""

    after_s = 3.0  # on a loaded machine a rank may not run for a second, which is a stall for the others

    def step() -> None:
        until = time.monotonic() + 2 * after_s
        x = Tensor([time.monotonic() < until])
        while x.item():
            time.sleep(0.05 * rank)
            x.fill_(time.monotonic() < until)
            dist.all_reduce(x, op=dist.ReduceOp.MIN)

    return _told_while(step, world=world, after_s=after_s)


def test_collectives_that_end_are_no_stall(run_ranks: RankPool) -> None:
    assert run_ranks(2, _busy) == [[], []]


def _watched_training(rank: int, world: int, seconds: float) -> list[str]:
    """Steps with a watchdog that reads 500 times a second: its reads must be safe while the thread runs."""
    messages: list[str] = []
    watch = watch_stalls(host="127.0.0.1", after_s=60, timeout_s=60, report=messages.append)
    assert watch is not None
    watch._tick_s = 0.002
    _, step = _wan(world, "nowhere", sleeps=False)
    until = torch.tensor(time.monotonic() + seconds)
    dist.broadcast(until, src=0)
    more = torch.tensor(1)
    while more.item():
        step()
        more.fill_(time.monotonic() < float(until))
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
    watch.stop()
    return messages


def test_a_watch_does_no_harm_to_what_it_watches(run_ranks: RankPool) -> None:
    assert run_ranks(2, _watched_training, 3.0) == [[], []]


@pytest.mark.full
def test_a_watch_does_no_harm_to_longer_work(run_ranks: RankPool) -> None:
    assert run_ranks(3, _watched_training, 20.0) == [[], [], []]


def _late(rank: int, world: int) -> float:
    """Seconds that a rank needs if its connection comes when the first rank could already have ended."""
    connect = loopback.TCPStore

    def connect_late(*args: Any, **settings: Any) -> object:
        if rank:
            time.sleep(1.0)
        return connect(*args, **settings)

    loopback.TCPStore = connect_late  # type: ignore[assignment,misc]
    start = time.monotonic()
    try:
        stall.watch_stalls(host="127.0.0.1", after_s=AFTER_S, timeout_s=60)
        return time.monotonic() - start
    finally:
        stall.stop_watch()
        loopback.TCPStore = connect  # type: ignore[misc]


def test_a_rank_zero_that_ends_at_once_blocks_no_other_rank(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _late)) < 5
