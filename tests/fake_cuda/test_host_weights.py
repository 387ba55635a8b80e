"""On a GPU, blocks get copies of their frozen weights on a separate stream, and the host waits for none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

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
    """A stand-in for streams, which need a device: the order of what runs on the side stream and is waited for."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.events: list[str] = []
        self.copies = 0
        self.beside = False

    @contextmanager
    def use(self, _: object) -> Iterator[None]:
        self.beside = True
        yield
        self.beside = False

    def record_event(self) -> str:
        self.copies += 1
        self.events.append(f"copied {self.copies}")
        return f"{self.copies}"

    def wait_event(self, event: str) -> None:
        self.events.append(f"waits for {event}")


def test_the_forward_waits_for_the_copies_of_its_block_only() -> None:
    blocks = nn.ModuleList(Block() for _ in range(3))
    host = HostWeights(blocks, list(blocks), ahead=True)
    streams = Streams()
    recorded: list[Tensor] = []
    patched: dict[str, Any] = {"Stream": lambda _: streams, "stream": streams.use, "current_stream": lambda _: streams}
    with fake_cuda() as crossings, mock.patch.multiple(torch.cuda, **patched):
        blocks.to("cuda")
        assert all(block.base.device.type == "cpu" and block.adapter.device.type == "cuda" for block in blocks)
        x = torch.zeros(2, 4, device="cuda")
        with mock.patch.object(Tensor, "record_stream", lambda x, _: recorded.append(x)):
            crossings.clear()
            for i, block in enumerate(blocks):
                x = block(x)
                assert block.base.device.type == "cuda"
                assert host.copied == [i, i + 1][: 3 - i]
                streams.events.append(f"runs {i + 1}")
        assert crossings.waits == []
        assert len(recorded) == 3, "the memory of copies is not used again while the forward needs it"
    expected = ["copied 1", "waits for 1", "copied 2", "runs 1", "waits for 2", "copied 3", "runs 2", "waits for 3"]
    assert streams.events == [*expected, "runs 3"]
    assert blocks[0].base.device.type == "cpu"
