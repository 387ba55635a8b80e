"""Rank 0's side of `follow`: its loop calls the pipeline on all ranks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

from torch import Tensor

from lightning_cp.comm.agree import text_of
from lightning_cp.engine.peers.checksum import version_of
from lightning_cp.errors import CallCancelledError
from lightning_cp.pipelines.serving.messages import Messages, from_bytes, to_bytes
from lightning_cp.pipelines.state import ParallelPipeline

_CALLBACK = "callback_on_step_end"  # the pipelines' name of the argument
_limit_s: ContextVar[float | None] = ContextVar("time limit of calls", default=None)


class Leader:
    """Calls a parallel pipeline on all ranks, from rank 0. Threads may share it; their calls run one after another.

    `cancel` and `time_limit` end a call, on all ranks; the next one works.
    """

    def __init__(self, pipe: Any, state: ParallelPipeline, requests: Messages) -> None:
        self._pipe, self._state, self._requests = pipe, state, requests
        self._turns, self._is_cancelled, self._has_ended = _Turns(), False, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline on all ranks.

        Args: arguments of the pipeline: numbers, text, tensors, arrays, images, generators, lists and dicts of them.
            `callback_on_step_end` runs on rank 0 only: it may raise, to cancel the call, but must change nothing.
        Returns: the pipeline's result.
        Raises: TypeError: an argument that cannot be sent. CallFailedError: another rank failed. RuntimeError: an
            earlier call failed inside an exchange, or a rank has exited; the loop of `follow` has ended; this is
            called inside a call.
        """
        callback = kwargs.pop(_CALLBACK, None)
        if hasattr(callback, "tensor_inputs"):
            raise TypeError(
                f"{_CALLBACK} is a {type(callback).__name__}, which changes the call but would run on rank 0 only: "
                "call the pipeline on every rank without follow, or give a function that changes nothing"
            )
        return self._run("__call__", args, kwargs, callback)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the pipeline, such as "load_lora_weights" or "transformer.set_adapters", on all ranks.

        Returns: the result on rank 0. If it fails on some of the ranks only, their components may differ: load the
        component again on all ranks.
        """
        _check_method(self._pipe, name)
        return self._run(name, args, kwargs)

    def cancel(self) -> None:
        """End the running call on all ranks; without one, do nothing. Call it from another thread or a signal handler.

        The call raises CallCancelledError before its next transformer call or decode.
        """
        self._is_cancelled = True

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

    def end(self, error: BaseException | None) -> None:
        """End the loop on the other ranks, unless they wait inside an exchange."""
        with self._turns.turn():
            self._has_ended = True
            if self._state.votes.broken is None:
                self._requests.send(name=None, error=None if error is None else text_of(error))

    def _run(self, name: str, args: Any, kwargs: dict[str, Any], callback: Callable[..., Any] | None = None) -> Any:
        votes, limit_s = self._state.votes, _limit_s.get()
        ends = None if limit_s is None else time.monotonic() + limit_s

        def interrupt() -> None:
            if self._is_cancelled:
                raise CallCancelledError("the call was cancelled")
            if ends is not None and time.monotonic() > ends:
                raise CallCancelledError(f"the call has taken longer than its limit of {limit_s} s")

        with self._turns.turn(limit_s):
            if self._has_ended:
                raise RuntimeError("the loop of follow has ended, so the other ranks take part in no further call")
            votes.check_usable()
            self._is_cancelled = False
            named = {"*": args, **kwargs}.items()
            arguments = {key: to_bytes(x, "a positional argument" if key == "*" else key) for key, x in named}
            try:
                self._requests.send(name=name, arguments=arguments, has_callback=callback is not None)
            except BaseException as error:  # a rank has exited, or Ctrl-C: later messages would not match
                votes.broken = error
                raise
            if callback is not None:
                kwargs = {**kwargs, _CALLBACK: _unchanging(callback)}
            votes.interrupt = interrupt
            try:
                with votes.call(by_leader=True):
                    return attrgetter(name)(self._pipe)(*args, **kwargs)
            finally:
                votes.interrupt = lambda: None


def take_part(pipe: Any, state: ParallelPipeline, message: dict[str, Any]) -> None:
    """Run a call of rank 0 on another rank. Raises: the error of the call."""
    with state.votes.call():  # an argument that only this rank cannot decode ends the call on all ranks
        kwargs = {key: from_bytes(x) for key, x in message["arguments"].items()}
        args = kwargs.pop("*")
        if message["has_callback"]:
            kwargs[_CALLBACK] = lambda *_: {}
        attrgetter(message["name"])(pipe)(*args, **kwargs)


def _check_method(pipe: Any, name: str) -> None:
    if not all(part.isidentifier() and not part.startswith("_") for part in name.split(".")):
        raise ValueError(f"{name!r} must be the name of a public method of the pipeline or of a component")
    if not callable(attrgetter(name)(pipe)):
        raise TypeError(f"{type(pipe).__name__}.{name} is not a method")


def _unchanging(callback: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Wrap rank 0's callback. Raises: ValueError: it makes changes, which the other ranks would not have."""

    def run(*args: Any) -> dict[str, Any]:
        before = {name: (x, _version(x)) for name, x in args[-1].items()}  # it may write into them
        after = args[-1] | (callback(*args) or {})
        changed = [
            name
            for name, x in after.items()
            if name not in before or x is not before[name][0] or _version(x) != before[name][1]
        ]
        if changed:
            raise ValueError(
                f"{_CALLBACK} runs on rank 0 only and must not change {', '.join(changed)}: return {{}}, or call the "
                "pipeline on every rank without follow"
            )
        return {}

    return run


def _version(x: object) -> int:
    return version_of(x) if isinstance(x, Tensor) else 0


class _Turns:
    """Let threads make one call at a time, in the order in which they begin to wait."""

    def __init__(self) -> None:
        self._threads, self._changed = deque[int](), threading.Condition()

    @contextmanager
    def turn(self, within_s: float | None = None) -> Iterator[None]:
        """Wait for the turn of this thread, which lasts until the end of this context.

        Raises: CallCancelledError: it has not come within these seconds. RuntimeError: the thread has it already.
        """
        thread = threading.get_ident()
        if thread in self._threads:
            raise RuntimeError(
                "leader is called inside one of its calls, by a callback for example, and would wait for that call: "
                "let the call return first, or use another thread"
            )
        try:
            with self._changed:
                self._threads.append(thread)
                if not self._changed.wait_for(lambda: self._threads[0] == thread, within_s):
                    raise CallCancelledError(f"other calls have taken longer than this call's limit of {within_s} s")
            yield
        finally:
            with self._changed:
                self._threads.remove(thread)
                self._changed.notify_all()
