"""Dropout of shards on a GPU: other masks on each rank, and the same state of the GPU's generator on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelConfig
from lightning_cp.engine.apply import parallelize
from tests.dist.engine.test_shard_dropout import _seen, _with_dropout
from tests.dist.plain import PLAIN_PLAN
from tests.harness import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
AROUND: tuple[Callable[..., Any], ...] = (
    lambda block, x: block(x),
    lambda block, x: checkpoint(block, x, use_reentrant=False),
)


def _dropped(rank: int, world: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor, bool]:
    """Masks of shards, a later draw, the states of the GPU's and the CPU's generator, and whether a replay is equal."""
    torch.manual_seed(0)
    model = _with_dropout(0.5).cuda()
    parallelize(model, ContextParallelConfig(ring_degree=world), PLAIN_PLAN)
    gradients = []
    for around in AROUND:
        torch.manual_seed(1)  # of the GPU's generator too
        model.around = around
        _seen(model)
        model.zero_grad()
        model(torch.ones(1, 11, 16, device="cuda"))[0].square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    masks = [mask.cpu() for mask in _seen(model)[:2]]
    after = torch.rand(3, device="cuda").cpu()
    states = torch.cuda.get_rng_state().clone(), torch.get_rng_state().clone()
    model.eval()
    model(torch.ones(1, 11, 16, device="cuda"))
    assert torch.equal(torch.cuda.get_rng_state(), states[0])
    is_same = bool(torch.allclose(*gradients, rtol=1e-4, atol=1e-4))
    return masks, after, *states, is_same


@pytest.mark.parametrize("world", [2, 3])
def test_shards_drop_other_elements_and_generators_stay_alike(run_ranks: RankPool, world: int) -> None:
    """Shards of 11 tokens are of unequal length, and would draw unequally many numbers."""
    found = run_ranks(world, _dropped, timeout_s=180)
    for masks, after, gpu_state, cpu_state, is_same in found:
        assert is_same, "checkpointing drops other elements"
        assert torch.equal(after, found[0][1])
        assert torch.equal(gpu_state, found[0][2])
        assert torch.equal(cpu_state, found[0][3])
        assert all(0.3 < mask.float().mean() < 0.7 for mask in masks)
    shortest = 11 // world
    for block in range(2):
        different = {found[rank][0][block][:shortest].flatten().numpy().tobytes() for rank in range(world)}
        assert len(different) == world
