"""A rank that does not join a collective while others wait: reported with rank, module and collective."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.launch import stall
from lightning_cp.launch.stall import StallWatch, watch_stalls
from tests.harness import RankPool
from tests.models import TINY

AFTER_S = 2.0
NAPS = "in nap)"


def _told_while(step: Callable[[], object], folder: str) -> list[str]:
    """Reports of naps by this rank's watch during a step. Args: folder: a report makes a file in it."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    told: list[str] = []

    def report(text: str) -> None:
        if NAPS in text:  # on a loaded machine there may be other stalls
            told.append(text)
            Path(folder, str(dist.get_rank())).touch()

    watch = watch_stalls(host="127.0.0.1", after_s=AFTER_S, timeout_s=60, report=report)
    assert watch is not None
    step()
    dist.barrier()
    watch.stop()
    return told


def _wan(world: int, place: str, folder: str = "") -> tuple[Any, Callable[[], object]]:
    """A model and its step. Args: folder: sleep until all other ranks have made a file in it."""
    tiny = TINY["wan"]
    model = tiny.build()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    arguments = tiny.arguments()

    def nap(*_: object) -> None:
        while folder and len(os.listdir(folder)) < world - 1:
            time.sleep(0.05)

    def backward_nap(_module: object, _inputs: object, output: Tensor) -> None:
        output.register_hook(nap)

    attention: Any = model.blocks[1].attn1
    attention.register_forward_pre_hook(nap) if place == "forward" else attention.register_forward_hook(backward_nap)

    def step() -> None:
        model(**arguments, return_dict=False)[0].sum().backward()

    return model, step


def _stalled(rank: int, world: int, place: str, folder: str) -> list[str]:
    _, step = _wan(world, place, folder if rank == 1 else "")
    return _told_while(step, folder)


def test_a_stalled_forward_is_reported_by_every_waiting_rank(run_ranks: RankPool, tmp_path: Path) -> None:
    first, sleeper, last = run_ranks(3, _stalled, "forward", str(tmp_path))
    assert sleeper == []
    for (told,) in (first, last):
        assert "has not ended for" in told
        assert "time-out: 60 s" in told
        assert "Pending.wait, blocks.1.attn1 of WanTransformer3DModel" in told
        assert "rank 1 is in no collective, blocks.1.attn1 of WanTransformer3DModel (comm/test_stall.py:" in told


def test_a_stalled_backward_is_reported_with_the_module_of_its_forward(run_ranks: RankPool, tmp_path: Path) -> None:
    (told,), _, _ = run_ranks(3, _stalled, "backward", str(tmp_path))
    assert "in backward, blocks.1.attn1 of WanTransformer3DModel" in told
    assert "rank 1 is in no collective" in told


def _first_is_elsewhere(rank: int, world: int, folder: str) -> list[str]:
    def nap() -> None:
        while rank == 0 and len(os.listdir(folder)) < world:
            time.sleep(0.05)

    return _told_while(nap, folder)


def test_rank_zero_reports_peers_that_wait_for_it(run_ranks: RankPool, tmp_path: Path) -> None:
    (first,), (other,) = run_ranks(2, _first_is_elsewhere, str(tmp_path))
    for told in (first, other):
        assert "rank 1 wait" in told
        assert "barrier" in told
        assert "rank 0 is in no collective (comm/test_stall.py:" in told


@contextmanager
def _fast_watch(tick_s: float) -> Iterator[tuple[StallWatch, list[str]]]:
    """A watch that reads often, and reports no wait of less than 30 s; and its reports."""
    start, messages = StallWatch.start, list[str]()

    def start_fast(watch: StallWatch) -> None:
        watch._tick_s = tick_s
        start(watch)

    with mock.patch.object(StallWatch, "start", start_fast):
        watch = watch_stalls(host="127.0.0.1", after_s=30, timeout_s=60, report=messages.append)
    assert watch is not None
    yield watch, messages
    watch.stop()


def _busy(rank: int, world: int) -> list[str]:
    """Collectives that take all the time, but end: the same lines again and again, which is progress each time."""
    with _fast_watch(0.02) as (watch, messages):
        progress, unchanged_s, x = 0, 0.0, torch.ones(1)
        while x.item():
            time.sleep(0.06 * rank)
            progress += watch._status.unchanged_s < unchanged_s
            unchanged_s = watch._status.unchanged_s
            x.fill_(progress < 10)
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return messages


def test_collectives_that_end_are_no_stall(run_ranks: RankPool) -> None:
    assert run_ranks(2, _busy) == [[], []]


def _watched_training(rank: int, world: int, beats: int) -> list[str]:
    """Steps with a watch that reads 500 times a second: its reads must be safe while the thread runs."""
    _, step = _wan(world, "nowhere")
    with _fast_watch(0.002) as (watch, messages):
        more = torch.tensor(1)
        while more.item():
            step()
            more.fill_(watch._status.beat < beats)
            dist.all_reduce(more, op=dist.ReduceOp.MAX)
    return messages


def test_a_watch_does_no_harm_to_what_it_watches(run_ranks: RankPool) -> None:
    assert run_ranks(2, _watched_training, 300) == [[], []]


@pytest.mark.full
def test_a_watch_does_no_harm_to_longer_work(run_ranks: RankPool) -> None:
    assert run_ranks(3, _watched_training, 4000) == [[], [], []]


def _late(rank: int, world: int) -> float:
    """Seconds that a rank needs if its connection comes when the first rank could already have ended."""
    connect = dist.TCPStore

    def connect_late(*args: Any, **settings: Any) -> object:
        if rank:
            time.sleep(1.0)
        return connect(*args, **settings)

    dist.TCPStore = connect_late  # type: ignore[assignment,misc]
    start = time.monotonic()
    try:
        stall.watch_stalls(host="127.0.0.1", after_s=AFTER_S, timeout_s=600)
        return time.monotonic() - start
    finally:
        stall.stop_watch()
        dist.TCPStore = connect  # type: ignore[misc]


def test_a_rank_zero_that_ends_at_once_blocks_no_other_rank(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _late)) < 100
