"""Threads that share the leader make their calls one after another, in their order."""

from __future__ import annotations

import threading
import time

import pytest

from lightning_cp.errors import CallCancelledError
from lightning_cp.pipelines.serving.leader import _Turns


def test_threads_take_turns_in_the_order_in_which_they_began_to_wait() -> None:
    turns, order = _Turns(), list[int]()

    def call(i: int) -> None:
        with turns.turn():
            order.append(i)

    with turns.turn():
        threads = [threading.Thread(target=call, args=(i,)) for i in range(5)]
        for i, thread in enumerate(threads):
            thread.start()
            while len(turns._threads) < i + 2:
                time.sleep(0.001)
        with pytest.raises(RuntimeError, match="leader is called inside one of its calls"), turns.turn():
            pass
        late = list[str]()
        threads.append(threading.Thread(target=lambda: late.append(_refusal(turns))))
        threads[-1].start()
        threads[-1].join()
        assert late == ["other calls have taken longer than this call's limit of 0.01 s"]
        assert not order
    for thread in threads:
        thread.join()
    assert order == list(range(5))
    assert not turns._threads


def _refusal(turns: _Turns) -> str:
    with pytest.raises(CallCancelledError) as caught, turns.turn(within_s=0.01):
        pass
    return str(caught.value)
