"""Calls wait for data groups in their order, and take no group that an earlier call needs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lightning_cp.errors import CallCancelledError
from lightning_cp.pipelines.serving.free_groups import FreeGroups

HOME, ALL = frozenset([0]), frozenset([0, 1, 2])


class _Calls:
    """Calls in threads. Each ends when it is told to."""

    def __init__(self, groups: FreeGroups) -> None:
        self._groups, self._threads = groups, list[threading.Thread]()
        self.running: dict[str, list[int]] = {}
        self._ends: dict[str, threading.Event] = {}
        self._changed = threading.Condition()

    def begin(self, name: str, needed: frozenset[int] | None) -> None:
        """Begin a call, and return once it has its groups or waits for them."""
        self._ends[name] = threading.Event()
        waiting = len(self._groups._waiting)
        self._threads.append(threading.Thread(target=self._run, args=(name, needed)))
        self._threads[-1].start()
        self.wait_until(lambda: name in self.running or len(self._groups._waiting) > waiting)

    def end(self, name: str) -> None:
        self._ends[name].set()
        self.wait_until(lambda: name not in self.running)

    def join(self) -> None:
        for end in self._ends.values():
            end.set()
        for thread in self._threads:
            thread.join(60)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            while not reached():
                self._changed.wait(0.01)

    def _run(self, name: str, needed: frozenset[int] | None) -> None:
        with self._groups.taken(needed, within_s=60) as numbers:
            with self._changed:
                self.running[name] = numbers
                self._changed.notify_all()
            self._ends[name].wait(60)
            with self._changed:
                del self.running[name]
                self._changed.notify_all()


def test_calls_take_groups_in_their_order_and_reserve_those_that_they_need() -> None:
    calls = _Calls(FreeGroups(3))
    try:
        for name in ("a", "b", "c"):
            calls.begin(name, None)
        assert calls.running == {"a": [0], "b": [1], "c": [2]}
        calls.begin("needs home", HOME)
        calls.begin("d", None)
        calls.end("b")
        calls.wait_until(lambda: "d" in calls.running)
        assert calls.running == {"a": [0], "c": [2], "d": [1]}, "it passes a call that waits for another group"
        calls.begin("e", None)
        calls.end("a")
        calls.wait_until(lambda: "needs home" in calls.running)
        assert calls.running["needs home"] == [0], "reserved, so not taken by a call behind it"
        assert "e" not in calls.running
        calls.end("c")
        calls.wait_until(lambda: "e" in calls.running)
        calls.begin("method", ALL)
        calls.begin("f", None)
        for name in ("needs home", "d", "e"):
            assert "f" not in calls.running, "it waits for the method before it"
            calls.end(name)
        calls.wait_until(lambda: "method" in calls.running)
        assert calls.running == {"method": [0, 1, 2]}
        calls.end("method")
        calls.wait_until(lambda: "f" in calls.running)
        assert calls.running == {"f": [0]}
    finally:
        calls.join()


def test_a_call_that_waits_too_long_leaves_the_queue() -> None:
    groups = FreeGroups(2)
    calls = _Calls(groups)
    try:
        calls.begin("a", None)
        with (
            pytest.raises(CallCancelledError, match=r"longer than this call's limit of 0\.01 s"),
            groups.taken(ALL - {2}, within_s=0.01),
        ):
            pass
        with groups.taken(None, within_s=0.01) as numbers:
            assert numbers == [1], "the method no longer reserves it"
    finally:
        calls.join()


@pytest.mark.parametrize(("taken", "needed"), [(ALL, None), (HOME, HOME), (HOME, ALL)])
def test_a_call_inside_a_call_that_would_wait_for_it_is_refused(
    taken: frozenset[int], needed: frozenset[int] | None
) -> None:
    groups = FreeGroups(3)
    with groups.taken(taken, within_s=None):
        with (
            pytest.raises(
                RuntimeError, match=r"leader is called inside one of its calls, .* let the call return first"
            ),
            groups.taken(needed, within_s=0.01),
        ):
            pass
        if taken != ALL:
            with groups.taken(None, within_s=0.01) as numbers:
                assert numbers == [1], "another group can run it"
    with groups.taken(needed, within_s=0.01) as numbers:
        assert len(numbers) == len(needed or [0])
