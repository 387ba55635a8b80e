"""A rank that does not join a collective: the ranks that wait report their module and collective."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.launch.stall import StallWatch, watch_stalls
from tests.harness import RankPool
from tests.models import TINY

AFTER_S = 2.0


def _told_while(step: Callable[[], object], folder: str) -> list[str]:
    """Reports by this rank's watch during a step. Args: folder: a report makes a file in it."""
    told: list[str] = []

    def report(text: str) -> None:
        told.append(text)
        Path(folder, str(dist.get_rank())).touch()

    watch = watch_stalls(after_s=AFTER_S, timeout_s=60, report=report)
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
    assert len(sleeper) <= len(first)
    for told in (first[0], last[0]):  # on a loaded machine there may be other stalls
        assert "has not ended for" in told
        assert "time-out: 60 s" in told
        assert "Pending.wait, blocks.1.attn1 of WanTransformer3DModel" in told
        assert "a rank without such a warning has not joined" in told


def test_a_stalled_backward_is_reported_with_the_module_of_its_forward(run_ranks: RankPool, tmp_path: Path) -> None:
    (told, *_), _, _ = run_ranks(3, _stalled, "backward", str(tmp_path))
    assert "in backward, blocks.1.attn1 of WanTransformer3DModel" in told
    assert "rank 0 waits in" in told


@contextmanager
def _fast_watch(tick_s: float) -> Iterator[tuple[StallWatch, list[str]]]:
    """A watch that reads often, and reports no wait of less than 30 s; and its reports."""
    start, messages = StallWatch.start, list[str]()

    def start_fast(watch: StallWatch) -> None:
        watch._tick_s = tick_s
        start(watch)

    with mock.patch.object(StallWatch, "start", start_fast):
        watch = watch_stalls(after_s=30, timeout_s=60, report=messages.append)
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
            more.fill_(watch._beats < beats)
            dist.all_reduce(more, op=dist.ReduceOp.MAX)
    return messages


def test_a_watch_does_no_harm_to_what_it_watches(run_ranks: RankPool) -> None:
    assert run_ranks(2, _watched_training, 300) == [[], []]
