"""Background gathers: their groups are only destroyed once they are done, or after a time limit."""

from __future__ import annotations

import time

import torch

from lightning_cp.comm.background import BackgroundGather, wait_for_gathers


class Work:
    """A transfer that is complete after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._complete_at = time.monotonic() + seconds

    def is_completed(self) -> bool:
        return time.monotonic() >= self._complete_at

    def wait(self) -> None:
        time.sleep(max(0.0, self._complete_at - time.monotonic()))


def test_unread_gathers_are_waited_for() -> None:
    gathers = [BackgroundGather(Work(seconds), torch.zeros(1, 1)) for seconds in (0.1, 0.3)]
    wait_for_gathers(within_s=60)
    assert all(gather.is_done() for gather in gathers)


def test_a_gather_that_never_ends_is_given_up() -> None:
    gather, began = BackgroundGather(Work(1000), torch.zeros(1, 1)), time.monotonic()
    wait_for_gathers(within_s=0.1)
    assert time.monotonic() - began < 500
    assert not gather.is_done()


def test_gathers_that_were_read_or_dropped_are_not_waited_for() -> None:
    read, dropped = BackgroundGather(Work(0), torch.zeros(1, 1)), BackgroundGather(Work(1000), torch.zeros(1, 1))
    read.read()
    read.work = Work(1000)
    del dropped
    began = time.monotonic()
    wait_for_gathers(within_s=900)
    assert time.monotonic() - began < 500
