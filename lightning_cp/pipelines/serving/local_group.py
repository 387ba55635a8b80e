"""Run the calls of `follow` in the data group of this rank, its first one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from lightning_cp.errors import CallCancelledError
from lightning_cp.pipelines.serving.plain_data import PlainData
from lightning_cp.pipelines.serving.rank0_callbacks import CALLBACK, unchanging
from lightning_cp.pipelines.serving.requests import Requests
from lightning_cp.pipelines.state import ParallelPipeline, use_degrees


@dataclass(frozen=True)
class Request:
    """Next call of all ranks of a data group.

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


@dataclass(frozen=True)
class GroupCall:
    """A request, and what the first rank of a data group needs to run it.

    Attributes:
        arguments: `args` and `kwargs` as they are sent.
        callback: rank 0's callback; None: there is none.
        end_reason: returns the reason to end the call before it is complete; None: there is none.
    """

    request: Request
    args: Any
    kwargs: dict[str, Any]
    arguments: PlainData
    end_reason: Callable[[], str | None]
    callback: Callable[..., Any] | None = None


class LocalGroup:
    """The data group of this rank, its first one: it sends each request to the others, and takes part in the call.

    Args: requests: from this rank to the other ranks of the group.
    """

    def __init__(self, pipe: Any, state: ParallelPipeline, requests: Requests) -> None:
        self._pipe, self._votes, self._requests = pipe, state.votes, requests

    @property
    def broken(self) -> BaseException | None:
        """Return the error after which the group can make no further call; None at first."""
        return self._votes.broken

    def check_usable(self) -> None:
        """Check that no earlier call has failed inside an exchange. Raises: RuntimeError: one has."""
        self._votes.check_usable()

    def start(self, call: GroupCall) -> Callable[[], Any]:
        """Send the request. Returns: a function that runs the call. Raises: CallFailedError: a rank has exited."""
        try:
            self._requests.send(asdict(call.request), call.arguments)
        except Exception as error:  # a rank that follows has exited
            self._votes.broken = error
            raise
        return partial(self._run, call)

    def end(self, error: str | None) -> None:
        """End the loop on the other ranks, unless they wait inside an exchange."""
        if self.broken is None:
            self._requests.send(asdict(Request(None, error=error)), PlainData.of())

    def _run(self, call: GroupCall) -> Any:
        def interrupt() -> None:
            reason = call.end_reason()
            if reason is not None:
                raise CallCancelledError(reason)

        kwargs = call.kwargs if call.callback is None else {**call.kwargs, CALLBACK: unchanging(call.callback)}
        self._votes.interrupt = interrupt
        try:
            with self._votes.call(by_leader=True):
                return run_request(self._pipe, call.request, call.args, kwargs)
        finally:
            self._votes.interrupt = _goes_on


def run_request(pipe: Any, request: Request, args: Any, kwargs: Any) -> Any:
    """Call the pipeline, or its method. Ranks: all of the data group."""
    with use_degrees(pipe, request.degrees):
        return (method_of(pipe, request.name) if request.name else pipe)(*args, **kwargs)


def method_of(pipe: Any, name: str) -> Callable[..., Any]:
    """Return a method by its path. Raises: ValueError: the path is not public. TypeError: it is no method."""
    if not all(part.isidentifier() and not part.startswith("_") for part in name.split(".")):
        raise ValueError(f"{name!r} must be the name of a public method of the pipeline or of a component")
    method = attrgetter(name)(pipe)
    if not callable(method):
        raise TypeError(f"{type(pipe).__name__}.{name} is not a method")
    bound: Callable[..., Any] = method
    return bound


def _goes_on() -> None:
    """Interrupt no call."""
