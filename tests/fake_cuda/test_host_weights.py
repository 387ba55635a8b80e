"""On a GPU, blocks get copies of their frozen weights on a separate stream, and the host waits for none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.finetune.host_weights import HostWeights
from tests.fake_cuda.world import fake_cuda


class Block(nn.Module):
    """A frozen matrix and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.adapter = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.base + self.adapter)


class Streams:
    """A stand-in for two streams, which need a device: the order of their work, and what waits for what."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.copies = 0
        self.beside = False
        self.side, self.forward = Stream(self), Stream(self)

    @contextmanager
    def use(self, stream: object) -> Iterator[None]:
        assert stream is self.side
        self.beside = True
        yield
        self.beside = False


class Stream:
    """One of them."""

    device = torch.device("cuda", 0)

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def record_event(self) -> str:
        assert self is self.streams.side
        self.streams.copies += 1
        self.streams.events.append(f"copied {self.streams.copies}")
        return f"{self.streams.copies}"

    def wait_event(self, event: str) -> None:
        assert self is self.streams.forward
        self.streams.events.append(f"waits for {event}")

    def wait_stream(self, stream: Stream) -> None:
        assert self is self.streams.side
        assert stream is self.streams.forward
        self.streams.events.append("side waits")


class StreamOfMemory(TorchDispatchMode):
    """Record the stream on which each tensor on the GPU is allocated, and on which each copy runs."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams
        self.allocated: list[bool] = []
        self.copied: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.copied.append(self.streams.beside)
        elif isinstance(result, Tensor) and result.device.type == "cuda":
            self.allocated.append(self.streams.beside)
        return result


@contextmanager
def on_streams() -> Iterator[tuple[Streams, Any]]:
    """Fake CUDA tensors with both streams. Yields: the streams, and a record of what crosses devices."""
    streams = Streams()
    patched: dict[str, Any] = {
        "Stream": lambda _: streams.side,
        "stream": streams.use,
        "current_stream": lambda _: streams.forward,
    }
    with fake_cuda() as crossings, mock.patch.multiple(torch.cuda, **patched):
        yield streams, crossings


def test_the_forward_waits_for_the_copies_of_its_block_only() -> None:
    blocks = nn.ModuleList(Block() for _ in range(3))
    host = HostWeights(blocks, list(blocks), ahead=True)
    with on_streams() as (streams, crossings):
        blocks.to("cuda")
        assert all(block.base.device.type == "cpu" and block.adapter.device.type == "cuda" for block in blocks)
        x = torch.zeros(2, 4, device="cuda")
        crossings.clear()
        with StreamOfMemory(streams) as memory:
            for i, block in enumerate(blocks):
                x = block(x)
                assert block.base.device.type == "cuda"
                assert host.copied == [i, i + 1][: 3 - i]
                streams.events.append(f"runs {i + 1}")
        assert crossings.waits == []
        assert memory.copied == [True] * 3
        assert not any(memory.allocated), "memory of the side stream could not be used again before the GPU is done"
    first, *others = (["side waits", f"copied {i}"] for i in (1, 2, 3))
    expected = [*first, "waits for 1", *others[0], "runs 1", "waits for 2", *others[1], "runs 2", "waits for 3"]
    assert streams.events == [*expected, "runs 3"]
    assert blocks[0].base.device.type == "cpu"


def test_copies_that_nothing_has_used_are_finished_before_their_memory_is_free() -> None:
    blocks = nn.ModuleList(Block() for _ in range(3))
    host = HostWeights(blocks, list(blocks), ahead=True)
    with on_streams() as (streams, _):
        blocks.to("cuda")
        blocks[0](torch.zeros(2, 4, device="cuda"))
        streams.events.clear()
        host.release()
    assert streams.events == ["waits for 2"]
    assert host.copied == []
