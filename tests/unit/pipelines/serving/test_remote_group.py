"""Rank 0's side of a call in another data group: devices of results, generators, and the message that ends the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch

from lightning_cp.errors import CallCancelledError, CallFailedError
from lightning_cp.pipelines.serving.local_group import GroupCall, Request
from lightning_cp.pipelines.serving.plain_data import PlainData
from lightning_cp.pipelines.serving.remote_group import RemoteGroup, Reply

ACCELERATOR = torch.device("meta")  # takes the place of a GPU


class _Channels:
    """Requests and replies of a data group that replies after `looks` looks at whether the call is to end."""

    def __init__(self, reply: Reply, result: PlainData, *, looks: int = 3) -> None:
        self.sent, self._reply, self._result, self._looks = list[dict[str, Any]](), reply, result, looks

    def send(self, fields: Mapping[str, Any], _: PlainData) -> None:
        self.sent.append(dict(fields))

    def start_send(self, fields: Mapping[str, Any], _: PlainData) -> Callable[[], None]:
        self.sent.append(dict(fields))
        return lambda: None

    def receive(self, meanwhile: Callable[[], None]) -> tuple[dict[str, Any], PlainData]:
        for _ in range(self._looks):
            meanwhile()
        return asdict(self._reply), self._result


def _run(channels: Any, *, reasons: list[str | None] | None = None, **kwargs: Any) -> tuple[Any, RemoteGroup]:
    group = RemoteGroup((2, 3), channels, channels, ACCELERATOR)
    left = list(reasons or [])
    call = GroupCall(Request(""), (), kwargs, PlainData.of(kwargs), lambda: left.pop(0) if left else None)
    return group.start(call), group


def test_tensors_arrive_on_the_device_of_rank_zero_and_generators_draw_on() -> None:
    generator, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    states = PlainData.of({"latents": torch.ones(2), "noise": torch.ones(3)}, {0: other.get_state()})
    torch.rand(5, generator=generator)
    assert states.tree[0]["dict"][1] == ("noise", {"tensor": [1, True]})
    states.tree[0]["dict"][1] = ("noise", {"tensor": [1, False]})  # it was not on the CPU
    channels = _Channels(Reply(), states)
    finish, _ = _run(channels, generator=generator)
    result = finish()
    assert (result["latents"].device.type, result["noise"].device.type) == ("cpu", "meta")
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=other))
    assert channels.sent == [asdict(Request("")), {}], "the request, and one message for the reply"


def test_a_call_is_ended_by_one_message_and_one_that_is_complete_returns() -> None:
    cancelled = _Channels(Reply("the head's text", is_cancelled=True), PlainData.of())
    finish, group = _run(cancelled, reasons=[None, "too long", "cancelled"])
    with pytest.raises(CallCancelledError, match=r"^too long$"):
        finish()
    assert cancelled.sent == [asdict(Request("")), {}]
    group.check_usable()
    complete = _Channels(Reply(), PlainData.of(7, {}))
    finish, _ = _run(complete, reasons=["too late"])
    assert finish() == 7
    assert complete.sent == [asdict(Request("")), {}]


def test_errors_leave_a_group_usable_unless_it_is_broken() -> None:
    finish, group = _run(_Channels(Reply("rank 3 failed"), PlainData.of()))
    with pytest.raises(CallFailedError, match=r"^rank 3 failed$"):
        finish()
    group.check_usable()
    finish, group = _run(_Channels(Reply("rank 3 failed", broken="OSError: disk"), PlainData.of()))
    with pytest.raises(CallFailedError, match=r"^rank 3 failed$"):
        finish()
    with pytest.raises(
        RuntimeError, match=r"ranks \[2, 3\] can make no further call, .* \(OSError: disk\): end the job"
    ):
        group.check_usable()


def test_ctrl_c_on_rank_zero_breaks_a_group_that_has_not_replied() -> None:
    def interrupt() -> str | None:
        raise KeyboardInterrupt

    channels: Any = _Channels(Reply(), PlainData.of(7, {}))
    group = RemoteGroup((1,), channels, channels, ACCELERATOR)
    with pytest.raises(KeyboardInterrupt):
        group.start(GroupCall(Request(""), (), {}, PlainData.of(), interrupt))()
    with pytest.raises(RuntimeError, match=r"ranks \[1\] can make no further call, .* \(KeyboardInterrupt: \)"):
        group.check_usable()
    group.end("an error")
    assert channels.sent == [asdict(Request(""))], "it would read the end of the loop as the end of the call"
