"""A VAE's function runs on one rank's rows only if it is known to give the same result there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from torch import Tensor, nn, ones

from lightning_cp.mesh import SINGLE_RANK
from lightning_cp.vae.rows import RowShardedOps

_X = ones(2, 3, 4, 5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(),
        lambda x: x.mean((2, 3)),
        lambda x: x.softmax(-1),
        lambda x: x.cumsum(2),
        lambda x: x.flip(2),
        lambda x: x.sum(1),
        lambda x: torch.roll(x, 1, 2),
        lambda x: F.layer_norm(x, (4, 5)),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.instance_norm(x),
        lambda x: x @ x.mT,
        lambda x: torch.randn_like(x),
        lambda x: F.unfold(x, 2),
        lambda x: torch.fft.fft(x),
    ],
)
def test_what_may_need_other_rows_is_refused_by_name(function: Callable[[Tensor], Tensor]) -> None:
    function(_X)
    with (
        RowShardedOps(replace(SINGLE_RANK, context_shape=(2, 1)), -2),
        pytest.raises(NotImplementedError, match=r"is not known .* one rank's rows .* vae.enable_tiling"),
    ):
        function(_X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(1, keepdim=True),
        lambda x: F.silu(x) * 2 + x.pow(2),
        lambda x: F.normalize(x, dim=1),
        lambda x: F.layer_norm(x.movedim(1, -1), (3,)),
        lambda x: F.linear(x.movedim(1, -1), ones(6, 3)),
        lambda x: torch.cat([x, x], 1).to(torch.float64).chunk(2, dim=1)[0],
        lambda x: x.clone().add_(1).mul_(x),
    ],
)
def test_what_works_on_each_row_is_unchanged(function: Callable[[Tensor], Tensor]) -> None:
    with RowShardedOps(replace(SINGLE_RANK, context_shape=(2, 1)), -2):
        found = function(_X)
    assert torch.equal(found, function(_X))


@pytest.mark.parametrize("offload", ["leaf_level", "block_level", ""])
def test_offloading_and_casting_of_weights_work_inside(offload: str) -> None:
    cpu = torch.device("cpu")
    module = nn.Sequential(nn.ModuleList([nn.Conv2d(3, 3, 1)])[0], nn.SiLU())
    if offload:
        blocks = {"num_blocks_per_group": 1} if offload == "block_level" else {}
        apply_group_offloading(module, onload_device=cpu, offload_device=cpu, offload_type=offload, **blocks)
    else:
        apply_layerwise_casting(module, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=())
    with torch.no_grad(), RowShardedOps(replace(SINGLE_RANK, context_shape=(2, 1)), -2):
        module(_X)
