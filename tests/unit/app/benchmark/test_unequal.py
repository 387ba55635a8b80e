"""A rank of half the speed does everything twice, with the same result."""

from __future__ import annotations

from unittest import mock

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.app.benchmark.unequal import half_speed
from lightning_cp.kernels.torch_kernels import CpuFlashKernel


def _forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    q = F.linear(x, weight).unflatten(-1, (2, 8))
    out = context_parallel_attention(q, q, q, parallel_config=ContextParallelConfig()).flatten(2)
    return out.add_(x)


def test_a_rank_of_half_speed_computes_the_same_twice() -> None:
    x, weight = torch.randn(1, 6, 16), torch.randn(16, 16)
    with torch.inference_mode(), FlopCounterMode(display=False) as once:
        expected = _forward(x, weight)
    forward = CpuFlashKernel.forward
    with (
        torch.inference_mode(),
        mock.patch.object(CpuFlashKernel, "forward", autospec=True, side_effect=forward) as kernel,
        FlopCounterMode(display=False) as counted,
        half_speed(x),
    ):
        found = _forward(x, weight)
    assert torch.equal(found, expected)
    assert (
        counted.get_flop_counts()["Global"][torch.ops.aten.mm]
        == 2 * once.get_flop_counts()["Global"][torch.ops.aten.mm]
    )
    assert kernel.call_count == 2
