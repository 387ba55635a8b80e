"""Many calls on one parallel pipeline: rank 0 makes them in a loop, the other ranks follow (`follow`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_cp.engine.checksum import version_of
from lightning_cp.errors import CallCancelledError, CallFailedError, PlanError
from lightning_cp.pipelines.placement import rank_device
from lightning_cp.pipelines.plain_data import PlainData
from lightning_cp.pipelines.requests import Requests
from lightning_cp.pipelines.state import ParallelPipeline, chosen_degrees, parallel_pipeline, use_degrees
from lightning_cp.pipelines.votes import Votes

_CALLBACK = "callback_on_step_end"
_IDLE = timedelta(days=365)  # a follower may wait long for the next request
_limit_s: ContextVar[float | None] = ContextVar("time limit of calls", default=None)
_log = logging.getLogger("lightning_cp")
T = TypeVar("T")


@dataclass(frozen=True)
class _Request:
    """Next call of all ranks.

    Attributes:
        name: attribute path of a method of the pipeline; "": the pipeline itself; None: end of the loop.
        degrees: name of the degrees for a call.
        error: text of the error that ended rank 0's loop; None if it returned.
        has_callback: rank 0 has a callback, so the others need one too.
    """

    name: str | None
    degrees: str = ""
    error: str | None = None
    has_callback: bool = False


def follow(pipe: Any, loop: Callable[[Leader], T]) -> T | None:
    """Run a loop on rank 0 that calls a parallel pipeline; the other ranks take part in each call.

    `loop(leader)` runs on rank 0 only. `leader(prompt=…)` calls the pipeline on all ranks and returns its result;
    calls may differ in size, steps and prompt. `leader.method("set_adapters", "style")` runs a method on all ranks.

    An error on any rank ends the call on all ranks: rank 0 gets its own error, or a CallFailedError with that of
    another rank, and can make the next call. An error inside an exchange between ranks, for which the others wait, is
    raised on the rank where it happened, which ends the job; `leader` raises at every later call.

    Security: a request holds plain data only, is sent without pickle, and is signed with the job's secret (see
    docs/training.md). What a user of your service sends is never unpickled, unless your loop does it.

    Args:
        pipe: pipeline made parallel by `parallelize_pipeline`, over all ranks of the world.
        loop: function of one argument, the `Leader`.
    Returns: the result of `loop`; None on the other ranks.
    Ranks: the whole world, which must share each sample (data parallelism is 1).
    Raises: PlanError: the pipeline is not parallel, or there are several data groups. On rank 0, what `loop` raises.
        CallFailedError: on the other ranks, if `loop` raises.
    """
    state = parallel_pipeline(pipe)
    if state is None:
        raise PlanError(f"{type(pipe).__name__} is not parallel: call parallelize_pipeline first")
    if state.ranks.data_size > 1:
        raise PlanError(
            f"follow needs all ranks for each call, but they are {state.ranks.data_size} data groups: increase ring, "
            "ulysses or cfg, or start fewer ranks"
        )
    with _request_group(state) as group:
        requests = Requests(group)
        if state.ranks.sample.context_rank == 0:
            return _lead(Leader(pipe, state, requests), state.votes, loop)
        _follow(pipe, state, requests)
        return None


class Leader:
    """Calls a parallel pipeline on all ranks, from rank 0. Threads may share it: their calls run one after another.

    `cancel` and `time_limit` end a call, on all ranks; the next one works.
    """

    def __init__(self, pipe: Any, state: ParallelPipeline, requests: Requests) -> None:
        self._pipe, self._state, self._requests = pipe, state, requests
        self._lock, self._is_cancelled = threading.Lock(), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline on all ranks, with the degrees of `use_degrees` on rank 0.

        Args: those of the pipeline: numbers, text, tensors, arrays, images, generators, and lists and dicts of them.
            `callback_on_step_end` runs on rank 0 only: it may raise, to cancel the call, but must change nothing.
        Returns: the pipeline's result.
        Raises: TypeError: an argument that cannot be sent. CallFailedError: another rank failed. RuntimeError: an
            earlier call failed inside an exchange.
        """
        callback = kwargs.pop(_CALLBACK, None)
        if hasattr(callback, "tensor_inputs"):  # a PipelineCallback, or several
            raise TypeError(
                f"{_CALLBACK} is a {type(callback).__name__}, which changes the call but would run on rank 0 only: "
                "call the pipeline on every rank without follow, or give a function that changes nothing"
            )
        request = _Request("", chosen_degrees(self._state), has_callback=callback is not None)
        return self._run(request, args, kwargs, callback)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the pipeline, such as "load_lora_weights" or "transformer.set_adapters", on all ranks.

        If it fails on some of the ranks only, their components may differ: load the component again on all ranks.
        """
        _method(self._pipe, name)
        return self._run(_Request(name, chosen_degrees(self._state)), args, kwargs)

    def cancel(self) -> None:
        """End the running call on all ranks; without one, do nothing. Call it from another thread, or a signal handler.

        The call raises CallCancelledError before its next transformer call or decode. The steps of PipeFusion that
        overlap are completed first.
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
        with self._lock:
            if self._state.votes.broken is None:
                text = None if error is None else f"{type(error).__name__}: {error}"
                self._requests.send(asdict(_Request(None, error=text)), PlainData.of())

    def _run(
        self, request: _Request, args: Any, kwargs: dict[str, Any], callback: Callable[..., Any] | None = None
    ) -> Any:
        limit_s, votes = _limit_s.get(), self._state.votes
        ends = None if limit_s is None else time.monotonic() + limit_s

        def interrupt() -> None:
            if self._is_cancelled:
                raise CallCancelledError("the call was cancelled")
            if ends is not None and time.monotonic() > ends:
                raise CallCancelledError(f"the call has taken longer than its limit of {limit_s} s")

        if not self._lock.acquire(timeout=-1 if limit_s is None else limit_s):
            raise CallCancelledError(f"other calls have taken longer than this call's limit of {limit_s} s")
        try:
            votes.check_usable()
            arguments = PlainData.of(args, kwargs)
            try:
                self._requests.send(asdict(request), arguments)
            except Exception as error:  # a rank that follows has exited
                votes.broken = error
                raise
            if callback is not None:
                kwargs[_CALLBACK] = _unchanging(callback)
            self._is_cancelled, votes.interrupt = False, interrupt
            with votes.call(by_leader=True):
                return _run(self._pipe, request, args, kwargs)
        finally:
            votes.interrupt = _goes_on
            self._lock.release()


def _lead(leader: Leader, votes: Votes, loop: Callable[[Leader], T]) -> T:
    votes.has_leader = True
    try:
        result = loop(leader)
        votes.check_usable()  # the loop may have ignored it
    except BaseException as error:
        leader.end(error)
        raise
    finally:
        votes.has_leader = False
    leader.end(None)
    return result


def _follow(pipe: Any, state: ParallelPipeline, requests: Requests) -> None:
    device = rank_device(state.ranks)
    while True:
        fields, arguments = requests.receive()
        request = _Request(**fields)
        if request.name is None:
            break
        try:
            with state.votes.call():
                args, kwargs = arguments.on(device)
                if request.has_callback:
                    kwargs[_CALLBACK] = _no_change
                _run(pipe, request, args, kwargs)
        except Exception as error:
            if state.votes.broken is not None:
                raise
            _log.debug("rank 0's call of %s ended with %s: %s", type(pipe).__name__, type(error).__name__, error)
    if request.error is not None:
        raise CallFailedError(f"rank 0's loop ended with an error: {request.error}")


def _run(pipe: Any, request: _Request, args: Any, kwargs: Any) -> Any:
    with use_degrees(pipe, request.degrees):
        return (_method(pipe, request.name) if request.name else pipe)(*args, **kwargs)


def _method(pipe: Any, name: str) -> Callable[..., Any]:
    """Return a method by its path. Raises: ValueError: the path is not public. TypeError: it is no method."""
    if not all(part.isidentifier() and not part.startswith("_") for part in name.split(".")):
        raise ValueError(f"{name!r} must be the name of a public method of the pipeline or of a component")
    method = attrgetter(name)(pipe)
    if not callable(method):
        raise TypeError(f"{type(pipe).__name__}.{name} is not a method")
    found: Callable[..., Any] = method
    return found


@contextmanager
def _request_group(state: ParallelPipeline) -> Iterator[dist.ProcessGroup | None]:
    """A group for requests; followers may wait in it for long. Ranks: the whole world."""
    if state.ranks.control is None:
        yield None
        return
    group: Any = dist.new_group(backend="gloo", timeout=_IDLE)
    yield group
    dist.destroy_process_group(group)  # after an error the job ends: others may be inside an exchange


def _unchanging(callback: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Wrap rank 0's callback. Raises: ValueError: it makes changes, which the other ranks would not have."""

    def run(*args: Any) -> dict[str, Any]:
        before = {name: (x, _version(x)) for name, x in args[-1].items()}  # it may write into them
        changes = callback(*args) or {}
        after = {**args[-1], **changes}
        changed = [name for name, x in after.items() if not _is_same(x, before.get(name))]
        if changed:
            raise ValueError(
                f"{_CALLBACK} runs on rank 0 only and must not change {', '.join(changed)}: return {{}}, or call the "
                "pipeline on every rank without follow"
            )
        return {}

    return run


def _goes_on() -> None:
    """Interrupt no call."""


def _is_same(x: object, before: tuple[object, int] | None) -> bool:
    return before is not None and x is before[0] and _version(x) == before[1]


def _version(x: object) -> int:
    return version_of(x) if isinstance(x, Tensor) else 0


def _no_change(*_: Any) -> dict[str, Any]:
    return {}
