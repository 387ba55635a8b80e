"""Checkpointed inputs in host memory: gradients, peak memory and time of a step on a GPU, and memory of the host."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import OffloadCheckpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
BLOCKS, WIDTH, TOKENS = 24, 2048, 16384
INPUT_BYTES = 4 * WIDTH * TOKENS


class _Block(nn.Module):
    """Several layers, longer than the copy of their input, and dropout."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        y = x
        for _ in range(8):
            y = torch.tanh(y @ self.weight + shift)
        return x + nn.functional.dropout(y, 0.1)


def _full(block: nn.Module, *args: Any) -> Any:
    return checkpoint(block, *args, use_reentrant=False)


def _trained(how: Any) -> tuple[Tensor, int, float]:
    """Return the gradients of four steps, the peak of the memory in use in the last one, and its seconds."""
    generator = torch.Generator().manual_seed(0)
    blocks = nn.ModuleList(_Block(generator) for _ in range(BLOCKS)).to(DEVICE)
    given = torch.randn(TOKENS, WIDTH, generator=generator).to(DEVICE)
    shift = torch.randn(TOKENS, WIDTH, generator=generator).to(DEVICE).requires_grad_()
    torch.manual_seed(0)
    for _ in range(4):
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        start = time.perf_counter()
        x = given
        for block in blocks:
            x = how(block, x, shift)
        x.square().mean().backward()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        del x
    peak = int(torch.cuda.memory_stats(DEVICE)["active_bytes.all.peak"])
    found = [p.grad for p in (*blocks.parameters(), shift) if p.grad is not None]
    return torch.cat([x.flatten() for x in found]).cpu(), peak, seconds


def test_gradients_are_equal_the_peak_is_lower_and_the_step_is_not_much_longer() -> None:
    expected, peak_of_full, seconds_of_full = _trained(_full)
    found, peak, seconds = _trained(OffloadCheckpoint())
    saved = (peak_of_full - peak) / INPUT_BYTES
    print(f"full: {peak_of_full / 1e9:.2f} GB, {seconds_of_full:.3f} s; offload: {peak / 1e9:.2f} GB, {seconds:.3f} s")
    assert torch.equal(found, expected)
    assert saved >= BLOCKS - 4, "on the device are the inputs of two blocks, and of at most two more in flight"
    assert seconds <= 1.1 * seconds_of_full


def test_pinned_memory_does_not_grow_with_steps() -> None:
    how = OffloadCheckpoint()
    weight = torch.randn(WIDTH, WIDTH, device=DEVICE, requires_grad=True)

    def step(tokens: int) -> None:
        x = torch.randn(tokens, WIDTH, device=DEVICE)
        for _ in range(4):
            x = how(lambda x: torch.tanh(x @ weight), x)
        x.sum().backward()

    sizes = [2048, 1024, 1536]
    for tokens in sizes * 3:
        step(tokens)
    torch.cuda.synchronize()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for tokens in sizes * 20:
        step(tokens)
    torch.cuda.synchronize()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before * 1.5
