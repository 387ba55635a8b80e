"""The order in which the background all-gather uses its stream, its event and its memory, on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm import background
from lightning_cp.comm.background import BackgroundGather, gather_in_background
from tests.fake_cuda.world import WORLD, fake_cuda, fake_ranks


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    with fake_ranks():
        yield


class _Device:
    """Notes what is done on which stream: "side" within `torch.cuda.stream`, else "current"."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.stream = "current"
        self.is_done = False

    def note(self, what: str) -> None:
        self.log.append((self.stream, what))

    @contextmanager
    def side(self, stream: object) -> Iterator[None]:
        self.stream = "side"
        yield
        self.stream = "current"

    def event(self) -> mock.Mock:
        """A CUDA event that is done once `is_done` is set."""
        event = mock.Mock()
        event.record.side_effect = lambda stream: self.note("record the event")
        event.query.side_effect = lambda: self.is_done
        event.synchronize.side_effect = lambda: self.note("wait on the host")
        return event

    def work(self, *args: Any, **kwargs: Any) -> mock.Mock:
        """An all-gather that sends nothing."""
        self.note("start")
        assert kwargs["async_op"] is True
        work = mock.Mock()
        work.wait.side_effect = lambda: self.note("wait for the transfer")
        return work


def _gather(device: _Device) -> tuple[BackgroundGather, Tensor]:
    copy = Tensor.copy_

    def noted_copy(to: Tensor, source: Tensor, *, non_blocking: bool = False) -> Tensor:
        assert (to.device.type, source.device.type, non_blocking) == ("cpu", "cuda", True)
        device.note("copy to the host")
        return copy(to, source, non_blocking=non_blocking)

    values = torch.empty(3, device="cuda", dtype=torch.float64)
    with ExitStack() as patches:
        for owner, name, new in (
            (torch.cuda, "Stream", mock.Mock()),
            (torch.cuda, "stream", device.side),
            (torch.cuda, "Event", device.event),
            (background, "all_gather_tensor", device.work),
            (Tensor, "copy_", noted_copy),
            (Tensor, "record_stream", lambda x, stream: device.note(f"keep {x.numel()} values")),
        ):
            patches.enter_context(mock.patch.object(owner, name, new))
        return gather_in_background(values, group=dist.group.WORLD), values


@pytest.mark.full
def test_only_the_side_stream_waits() -> None:
    device = _Device()
    with fake_cuda() as recorder:
        gather, values = _gather(device)
        assert device.log == [
            ("current", "start"),
            ("side", "wait for the transfer"),
            ("side", "copy to the host"),
            ("side", "record the event"),
            ("current", "keep 3 values"),
            ("current", f"keep {3 * WORLD} values"),
        ]
        assert (gather.gathered.device.type, gather.gathered.dtype) == ("cpu", torch.float64)
        assert gather.gathered.shape == (WORLD, 3)
        assert gather.kept_alive[0] is values
        assert recorder.crossings == ["aten.copy_.default"], "the copy to the host, and nothing else"


def test_a_background_gather_is_done_when_its_event_is() -> None:
    device = _Device()
    with fake_cuda():
        gather, _ = _gather(device)
        assert not gather.is_done(within_s=0.01)
        device.is_done = True
        assert gather.is_done()
        gather.work.is_completed.assert_not_called()
    gather.gathered = torch.ones(WORLD, 3)
    assert gather.read().shape == (WORLD, 3)
    assert device.log[-1] == ("current", "wait on the host")
    assert gather.kept_alive == ()
