"""Run calls of `follow` in another data group: rank 0 sends them to its first rank, which sends back the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from lightning_cp.comm.agree import text_of
from lightning_cp.errors import CallCancelledError, CallFailedError
from lightning_cp.pipelines.serving.local_group import GroupCall, LocalGroup, Request
from lightning_cp.pipelines.serving.plain_data import PlainData
from lightning_cp.pipelines.serving.requests import Incoming, Requests


@dataclass(frozen=True)
class Reply:
    """Outcome of a call. Its result, and the states of its generators, are sent with it.

    Attributes:
        error: text of the error that it raised; None if it returned.
        is_cancelled: that is a CallCancelledError.
        broken: text of the error after which the group can make no further call; None: it can.
    """

    error: str | None = None
    is_cancelled: bool = False
    broken: str | None = None


class RemoteGroup:
    """Another data group: its first rank runs the calls that rank 0 sends, and sends back what they return.

    Args:
        ranks: its global ranks.
        requests: from rank 0 to its first rank: a request, and then one message to end the call, before its reply, or
            to confirm the reply.
        replies: from its first rank to rank 0.
        device: where results on an accelerator are put.
    """

    def __init__(self, ranks: tuple[int, ...], requests: Requests, replies: Requests, device: torch.device) -> None:
        self._ranks, self._requests, self._replies, self._device = list(ranks), requests, replies, device
        self._broken: str | None = None

    def check_usable(self) -> None:
        """Check that the group can make calls. Raises: RuntimeError: an earlier call has broken it."""
        if self._broken is not None:
            raise RuntimeError(
                f"the data group of ranks {self._ranks} can make no further call, because an earlier one failed inside "
                f"an exchange between ranks ({self._broken}): end the job"
            )

    def start(self, call: GroupCall) -> Callable[[], Any]:
        """Send the request. Returns: a function that waits for the result.

        Raises: CallFailedError: a rank has exited.
        """
        with self._breaking():
            self._requests.send(asdict(call.request), call.arguments)
        return partial(self._finish, call)

    def end(self, error: str | None) -> None:
        """End the loop on the group's ranks, unless a call has broken it."""
        if self._broken is None:
            self._requests.send(asdict(Request(None, error=error)), PlainData.of())

    def _finish(self, call: GroupCall) -> Any:
        reason: str | None = None
        wait_for_end: Callable[[], None] | None = None

        def end_early() -> None:
            nonlocal reason, wait_for_end
            if reason is None and (end := call.end_reason()) is not None:
                reason = end
                wait_for_end = self._requests.start_send({}, PlainData.of())  # perhaps read after the reply only

        with self._breaking():
            fields, data = self._replies.receive(meanwhile=end_early)
            (wait_for_end or self._requests.start_send({}, PlainData.of()))()
        reply = Reply(**fields)
        self._broken = reply.broken
        if reply.is_cancelled:
            raise CallCancelledError(reason or reply.error)
        if reply.error is not None:
            raise CallFailedError(reply.error)
        result, states = data.on(self._device)
        for index, state in states.items():
            call.arguments.generators[index].set_state(state.clone())  # torch crashes with a view of a larger buffer
        return result

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Exchange messages in this context. After an error, or Ctrl-C, the next ones would not match."""
        try:
            yield
        except BaseException as error:
            self._broken = text_of(error)
            raise


def serve(
    group: LocalGroup, name: str, requests: Requests, replies: Requests, *, rank: int, device: torch.device
) -> str | None:
    """Run the calls that rank 0 sends, until its loop ends; then end the loop on the other ranks of the group.

    Args: group: the group of this rank. name: class name of the pipeline. requests, replies: see `RemoteGroup`.
    Ranks: the first of the group; the others follow it.
    Returns: the text of the error that ended rank 0's loop; None if it returned.
    Raises: CallFailedError: rank 0 has exited. The error of a call that has broken the group.
    """
    try:
        ended = _run_calls(group, requests, replies, device, failed=f"rank {rank} failed in this call of {name}")
    except BaseException as error:
        group.end(text_of(error))
        raise
    group.end(ended)
    return ended


def _run_calls(
    group: LocalGroup, requests: Requests, replies: Requests, device: torch.device, *, failed: str
) -> str | None:
    """Run the calls that rank 0 sends. Returns: see `serve`. Args: failed: begins the text of an error of this rank."""
    while True:
        fields, arguments = requests.receive()
        request = Request(**fields)
        if request.name is None:
            return request.error
        ending, error, result = requests.start_receive(), None, PlainData.of()
        try:
            result = _result(group, request, arguments, device=device, ending=ending)
        except Exception as raised:
            error = raised
        replies.send(asdict(_reply(error, group.broken, failed)), result)
        ending.read()
        if error is not None and group.broken is not None:
            raise error


def _result(
    group: LocalGroup, request: Request, arguments: PlainData, *, device: torch.device, ending: Incoming
) -> PlainData:
    """Run a call. Returns: its result, and the states of its generators by their number. A method has no result."""

    def end_reason() -> str | None:
        if not ending.has_arrived():
            return None
        ending.read()
        return "rank 0 has ended the call"

    args, kwargs = arguments.on(device)
    result = group.start(GroupCall(request, args, kwargs, arguments, end_reason))()
    states = {number: x.get_state() for number, x in arguments.generators.items()}
    return PlainData.of(None if request.name else result, states)


def _reply(error: Exception | None, broken: BaseException | None, failed: str) -> Reply:
    """Describe the outcome of a call. Args: failed: what to say of an error of this rank."""
    if error is None:
        return Reply()
    is_named = isinstance(error, CallFailedError)  # with the rank that has failed
    return Reply(
        str(error) if is_named else f"{failed}: {text_of(error)}",
        isinstance(error, CallCancelledError),
        None if broken is None else text_of(broken),
    )
