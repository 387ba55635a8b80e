"""Rank 0's side of `follow`: give each call to a free data group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lightning_cp.comm.agree import text_of
from lightning_cp.pipelines.serving.free_groups import FreeGroups
from lightning_cp.pipelines.serving.local_group import GroupCall, LocalGroup, Request, method_of
from lightning_cp.pipelines.serving.plain_data import PlainData
from lightning_cp.pipelines.serving.rank0_callbacks import CALLBACK, check_callback
from lightning_cp.pipelines.serving.remote_group import RemoteGroup
from lightning_cp.pipelines.state import ParallelPipeline, chosen_degrees

_LOCAL = frozenset([0])  # number of the data group of rank 0
_limit_s: ContextVar[float | None] = ContextVar("time limit of calls", default=None)


class Leader:
    """Calls a parallel pipeline on several ranks, from rank 0. Threads may share it.

    Each call runs in one data group. Calls of several threads run at the same time, as many as there are data groups;
    the others wait. `cancel` and `time_limit` end a call, on all ranks of its group; the next one works.
    """

    def __init__(self, pipe: Any, state: ParallelPipeline, groups: Sequence[LocalGroup | RemoteGroup]) -> None:
        self._pipe, self._state, self._groups = pipe, state, groups
        self._free, self._all = FreeGroups(len(groups)), frozenset(range(len(groups)))
        self._last_cancel = object()  # another one after each `cancel`
        self._has_ended = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline on the ranks of a free data group, with the degrees of `use_degrees` on rank 0.

        Args: arguments of the pipeline: numbers, text, tensors, arrays, images, generators, lists and dicts of them.
            `callback_on_step_end` runs on rank 0 only: it may raise, to cancel the call, but must change nothing. Such
            a call waits for the data group of rank 0.
        Returns: the pipeline's result.
        Raises: TypeError, ValueError: an argument that cannot be sent. CallFailedError: another rank failed; all errors
            in a data group without rank 0. RuntimeError: an earlier call failed inside an exchange, or a rank has
            exited; the loop of `follow` has ended; this is called inside a call.
        """
        callback = kwargs.pop(CALLBACK, None)
        check_callback(callback)
        request = Request("", chosen_degrees(self._state), has_callback=callback is not None)
        return self._run(request, args, kwargs, needed=None if callback is None else _LOCAL, callback=callback)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the pipeline, such as "load_lora_weights" or "transformer.set_adapters", on all ranks.

        It waits for the calls before it, and those after it wait for it. Returns: the result on rank 0.
        If it fails on some of the ranks only, their components may differ: load the component again on all ranks.
        """
        method_of(self._pipe, name)
        return self._run(Request(name, chosen_degrees(self._state)), args, kwargs, needed=self._all)

    def cancel(self) -> None:
        """End the running calls on all ranks; without one, do nothing. Call it from another thread or a signal handler.

        A call raises CallCancelledError before its next transformer call or decode.
        """
        self._last_cancel = object()

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Limit the time of each call of this thread (or asyncio task) in this context.

        It begins when the call begins to wait for those of other threads. Then see `cancel`.
        """
        if not seconds > 0:
            raise ValueError(f"time_limit({seconds!r}) must be a positive number of seconds")
        token = _limit_s.set(seconds)
        try:
            yield
        finally:
            _limit_s.reset(token)

    def check_usable(self) -> None:
        """Check that no data group is broken. Raises: RuntimeError: one is; the error names it."""
        for group in self._groups:
            group.check_usable()

    def end(self, error: BaseException | None) -> None:
        """End the loop on the other ranks, unless they wait inside an exchange."""
        with self._free.taken(self._all, within_s=None):
            self._has_ended = True
            for group in self._groups:
                group.end(None if error is None else text_of(error))

    def _run(
        self,
        request: Request,
        args: Any,
        kwargs: dict[str, Any],
        *,
        needed: frozenset[int] | None,
        callback: Callable[..., Any] | None = None,
    ) -> Any:
        limit_s = _limit_s.get()
        ends = None if limit_s is None else time.monotonic() + limit_s

        def end_reason() -> str | None:
            if self._last_cancel is not last_cancel:
                return "the call was cancelled"
            if ends is not None and time.monotonic() > ends:
                return f"the call has taken longer than its limit of {limit_s} s"
            return None

        with self._free.taken(needed, within_s=limit_s) as numbers:
            if self._has_ended:
                raise RuntimeError("the loop of follow has ended, so the other ranks take part in no further call")
            self.check_usable()
            last_cancel = self._last_cancel
            call = GroupCall(request, args, kwargs, PlainData.of(args, kwargs), end_reason, callback)
            runs = [self._groups[number].start(call) for number in reversed(numbers)]
            return _first_result(runs[::-1])  # begins with this rank's part of the call


def _first_result(runs: Sequence[Callable[[], Any]]) -> Any:
    """Run a call in each group, also after one has failed. Returns: the first result. Raises: the first error."""
    results, errors = list[Any](), list[BaseException]()
    for run in runs:
        try:
            results.append(run())
        except BaseException as error:  # also Ctrl-C: the replies of the other groups must be read
            errors.append(error)
    if errors:
        raise errors[0]
    return results[0]
