"""A VAE's function runs on one rank's rows only if it is known to give the same result there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from torch import Tensor, nn, ones

from lightning_cp.mesh.groups import SINGLE_RANK
from lightning_cp.vae.rows import RowShardedOps

_GROUPS = replace(SINGLE_RANK, context_shape=(2, 1))


def _rows(count: int = 4) -> Tensor:
    """Image [samples, channels, rows, columns]."""
    return torch.arange(2.0 * 3 * count * 5).reshape(2, 3, count, 5).sin()


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
    x = _rows()
    function(x)
    with (
        RowShardedOps(_GROUPS, -2),
        pytest.raises(NotImplementedError, match=r"is not known .* one rank's rows .* vae.enable_tiling"),
    ):
        function(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(1, keepdim=True),
        lambda x: F.silu(x) * 2 + x.pow(2),
        lambda x: F.normalize(x, dim=1),
        lambda x: F.layer_norm(x.movedim(1, -1), (3,)).movedim(-1, 1),
        lambda x: F.linear(x.movedim(1, -1), ones(6, 3)).movedim(-1, 1),
        lambda x: torch.cat([x, x], 1).to(torch.float64).chunk(2, dim=1)[0],
        lambda x: x.clone().add_(1).mul_(x),
        lambda x: x.flatten(2).transpose(1, 2).reshape(2, -1, 5, 3).movedim(-1, 1) - ones(3, 1, 1),
        lambda x: x.repeat(2, 1, 1, 1).repeat_interleave(2, 2).repeat_interleave(2, dim=3),
        lambda x: x.type_as(ones(7, 7)) + torch.zeros_like(x),
    ],
)
def test_what_works_on_each_row_is_unchanged(function: Callable[[Tensor], Tensor]) -> None:
    """Each half of the rows gives its rows of the result."""
    x = _rows(8)
    halves = []
    for local in x.split(4, 2):
        with RowShardedOps(_GROUPS, -2):
            halves.append(function(local))
    torch.testing.assert_close(torch.cat(halves, 2), function(x))


@pytest.mark.parametrize("offload", ["leaf_level", "block_level", ""])
def test_offloading_and_casting_of_weights_work_inside(offload: str) -> None:
    cpu = torch.device("cpu")
    module = nn.Sequential(nn.ModuleList([nn.Conv2d(3, 3, 1)])[0], nn.SiLU())
    if offload:
        blocks = {"num_blocks_per_group": 1} if offload == "block_level" else {}
        apply_group_offloading(module, onload_device=cpu, offload_device=cpu, offload_type=offload, **blocks)
    else:
        apply_layerwise_casting(module, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=())
    with torch.no_grad(), RowShardedOps(_GROUPS, -2):
        module(_rows())
