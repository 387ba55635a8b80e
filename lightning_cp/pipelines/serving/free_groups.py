"""Let each call of several threads wait until the data groups that it needs are free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_cp.errors import CallCancelledError


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A call that waits. Attributes: needed: numbers of the groups that it needs; None: any one of them."""

    needed: frozenset[int] | None


class FreeGroups:
    """The data groups that no call uses. Calls take them in the order in which they begin to wait.

    A call that needs certain groups reserves them: later calls take the others.

    Args: count: number of data groups.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free, self._waiting = set(range(count)), list[_Waiting]()
        self._taken_by: dict[int, frozenset[int]] = {}  # groups of each thread that has some
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, needed: frozenset[int] | None, *, within_s: float | None) -> Iterator[list[int]]:
        """Take groups, and free them after this context. Yields: their numbers.

        Args:
            needed: numbers of the groups; None: the free one with the lowest number.
            within_s: seconds to wait for them; None: no limit.
        Raises: CallCancelledError: they are still in use. RuntimeError: this thread itself uses them.
        """
        thread = threading.get_ident()
        before = self._taken_by.get(thread, frozenset())
        if len(before) == self._count or (needed is not None and needed & before):
            raise RuntimeError(
                "leader is called inside one of its calls, by a callback for example, and would wait for that call: "
                "let the call return first, or use another thread"
            )
        groups = self._take(_Waiting(needed), within_s)
        self._taken_by[thread] = before | groups
        try:
            yield sorted(groups)
        finally:
            self._taken_by[thread] = before
            if not before:
                del self._taken_by[thread]
            with self._changed:
                self._free |= groups
                self._changed.notify_all()

    def _take(self, waiting: _Waiting, within_s: float | None) -> frozenset[int]:
        with self._changed:
            self._waiting.append(waiting)
            try:
                if not self._changed.wait_for(lambda: self._groups_for(waiting), within_s):
                    raise CallCancelledError(f"other calls have taken longer than this call's limit of {within_s} s")
                groups = self._groups_for(waiting)
                self._free -= groups
                return groups
            finally:
                self._waiting.remove(waiting)
                self._changed.notify_all()  # those behind it in the queue may have a group now

    def _groups_for(self, waiting: _Waiting) -> frozenset[int]:
        """Return the groups that a call can take, after those that have waited longer; none if it must wait."""
        free = frozenset(self._free)
        for one in self._waiting:
            needed = frozenset(sorted(free)[:1]) if one.needed is None else one.needed
            if one is waiting:
                return needed if needed <= free else frozenset()
            free -= needed
        raise AssertionError("a call waits in the queue until it has its groups")
