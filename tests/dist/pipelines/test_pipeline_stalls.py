"""Stalls while a parallel pipeline is called: reported on every waiting rank, from any thread, but not idle waits."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_cp import ContextParallelConfig, parallelize_pipeline, unparallelize_pipeline
from lightning_cp.launch.stall import current_watch
from lightning_cp.pipelines import Leader, follow
from tests.harness import RankPool
from tests.pipelines import PIPES

AFTER_S = 1.0
SMALL = {**PIPES["sd3"].inputs(), "num_inference_steps": 1}


def _parallel(ring: int, **settings: Any) -> Any:
    pipe = PIPES["sd3"].make()
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=ring), **settings)
    return pipe


def _reports(rank: int, folder: str) -> list[str]:
    """Reports of this rank's watch, from now on. A report makes a file in the folder."""
    messages, watch = list[str](), current_watch()

    def report(text: str) -> None:
        messages.append(text)
        Path(folder, str(rank)).touch()

    watch._report = report  # type: ignore[union-attr]
    return messages


def _let_beat(beats: int) -> None:
    """Wait until this rank's watch has looked so many times."""
    watch: Any = current_watch()
    end = watch._beats + beats
    while watch._beats < end:
        time.sleep(0.05)


def _stalls(rank: int, world: int, folder: str) -> tuple[list[str], bool]:
    """Return the reports of a stall in a thread's call, and whether the followers' wait for a request is reported."""

    def nap(*_: Any) -> dict[str, Any]:
        while rank == 1 and len(os.listdir(folder)) < world - 1:
            time.sleep(0.05)
        return {}

    pipe = _parallel(world, stall_s=AFTER_S)
    messages = _reports(rank, folder)
    thread = threading.Thread(target=lambda: pipe(**SMALL, callback_on_step_end=nap))
    thread.start()
    thread.join()
    of_call = list(messages)

    def loop(leader: Leader) -> bool:
        leader(**SMALL)
        _let_beat(3)
        before = len(messages)
        _let_beat(7)  # more than AFTER_S
        return len(messages) > before

    return of_call, bool(follow(pipe, loop))


@pytest.mark.full
def test_a_stalled_call_is_reported_from_any_thread_and_idle_followers_are_not(
    run_ranks: RankPool, tmp_path: Path
) -> None:
    reports = run_ranks(3, _stalls, str(tmp_path))
    for of_call, _ in (reports[0], reports[2]):  # on a busy machine, there may be other stalls
        assert any("waits in" in text for text in of_call), of_call
    assert not any(is_reported for _, is_reported in reports)


def _watches(rank: int, world: int) -> list[object]:
    unwatched = _parallel(world, stall_s=None)
    seen: list[object] = [current_watch()]
    first, second = _parallel(world, stall_s=30), _parallel(world)
    watch = current_watch()
    assert watch is not None
    seen += [watch.users, watch._after_s]
    unparallelize_pipeline(first)
    unparallelize_pipeline(unwatched)
    seen.append(current_watch() is watch)
    unparallelize_pipeline(second)
    return [*seen, current_watch(), watch._thread.is_alive()]


def test_pipelines_share_one_watch_that_ends_with_the_last_of_them(run_ranks: RankPool) -> None:
    assert run_ranks(2, _watches) == 2 * [[None, 2, 30, True, None, False]]
