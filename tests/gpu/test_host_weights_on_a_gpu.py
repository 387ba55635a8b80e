"""Blocks whose frozen weights stay in host memory: gradients, memory and waits of a step on a GPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp.finetune.host_weights import HostWeights, offload_blocks
from tests.dist.finetune.test_finetune_lora import loss_of
from tests.pretrained import inputs
from tests.unit.finetune.test_host_weights import adapted
from tests.unit.finetune.test_host_weights import gradients as gradients_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
BLOCKS, WIDTH = 12, 2048
BLOCK_BYTES = 4 * WIDTH * WIDTH


def _waits(step: Callable[[], object]) -> int:
    """Return how often a step makes the host wait for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    texts = [str(warning.message) for warning in recorded]
    return sum("synchroniz" in text and "prototype" not in text for text in texts)


@pytest.mark.parametrize("weights", [None, "int8", "nf4"])
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_gradients_and_waits_are_those_of_weights_on_the_gpu(name: str, weights: str | None) -> None:
    model, plain = adapted(name, weights), adapted(name, weights)
    host = offload_blocks(model)
    model.to(DEVICE)
    plain.to(DEVICE)
    frozen = [x for block in host._units for x in block.parameters() if not x.requires_grad]
    assert {x.device.type for x in frozen} == {"cpu"}
    given: dict[str, Any] = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in inputs(name).items()}
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            loss_of(each, given).backward()
        found, expected = gradients_of(model), gradients_of(plain)
        assert found.keys() == expected.keys()
        mine, theirs = (torch.cat([x[key].flatten() for key in expected]) for x in (found, expected))
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-5
    assert all(x.is_pinned() for x in frozen)
    assert _waits(lambda: loss_of(model, given).backward()) <= _waits(lambda: loss_of(plain, given).backward())
    host.release()
    assert {x.device.type for block in host._units for x in block.parameters() if not x.requires_grad} == {"cpu"}


class _Block(nn.Module):
    """A large frozen matrix and a small trained vector."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        matrix = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.base = nn.Parameter(matrix, requires_grad=False)
        self.adapter = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):  # longer than the copy of a block
            x = torch.tanh(x @ self.base * self.adapter)
        return x


def _stack() -> nn.ModuleList:
    generator = torch.Generator().manual_seed(0)
    return nn.ModuleList(_Block(generator) for _ in range(BLOCKS))


def _step(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    loss = x.square().mean()
    loss.backward()
    return loss.detach()


def _trained(blocks: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return losses and summed gradients of four steps, and the peak of the memory in use in the last one.

    Memory that was freed, but still waits for a stream, is in use.
    """
    losses = [_step(blocks, x) for _ in range(3)]
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()  # counts what is free now
    torch.cuda.reset_peak_memory_stats(DEVICE)
    losses.append(_step(blocks, x))
    torch.cuda.synchronize()
    peak = int(torch.cuda.memory_stats(DEVICE)["active_bytes.all.peak"])
    return torch.stack(losses), torch.cat([p.grad for p in blocks.parameters() if p.grad is not None]), peak


def test_the_gpu_holds_few_blocks_at_a_time_and_no_copy_is_overwritten_early() -> None:
    """The host launches several blocks ahead of the GPU."""
    x = torch.randn(8192, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses, gradients, peak_of_all = _trained(_stack().to(DEVICE), x)
    gc.collect()
    blocks = _stack()
    host = HostWeights(blocks, list(blocks), ahead=True)
    found_losses, found, peak = _trained(blocks.to(DEVICE), x)
    host.release()
    torch.testing.assert_close(found_losses, losses, rtol=1e-5, atol=0)
    assert (found - gradients).norm() < 1e-5 * gradients.norm()
    held = BLOCKS - (peak_of_all - peak) / BLOCK_BYTES
    assert held <= 3, "the weights of two blocks, and of at most one more that autograd still holds"
