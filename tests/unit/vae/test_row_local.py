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
from lightning_cp.vae.row_dims import RowDim, _of_reshape, row_dim_of, set_row_dim
from lightning_cp.vae.rows import RowShardedOps

_GROUPS = replace(SINGLE_RANK, context_shape=(2, 1))


def _rows(count: int = 4) -> Tensor:
    """Image [samples, channels, rows, columns], split by rows."""
    x = torch.arange(2.0 * 3 * count * 5).reshape(2, 3, count, 5).sin()
    set_row_dim(x, RowDim(2))
    return x


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
        lambda x: x.mean(-2),
        lambda x: x.mean(dim=2, keepdim=True),
        lambda x: F.normalize(x, dim=-2),
        lambda x: F.normalize(x.movedim(2, 1)),
        lambda x: x.transpose(1, 3).flatten(2).mean(2),
        lambda x: F.layer_norm(x.transpose(2, 3), (4,)),
        lambda x: F.linear(x.mT, ones(6, 4)),
        lambda x: torch.cat([x, x], -2),
        lambda x: torch.cat([x.movedim(2, 0), x.movedim(2, 0)]),
        lambda x: x * torch.linspace(0, 1, x.shape[2])[:, None],
        lambda x: x + torch.ones(4, 5),
        lambda x: x[..., :4] + x[..., :4].mT,
        lambda x: x[:, :, 0],
        lambda x: x[:, :, 1:],
        lambda x: x[:, :, ::2],
        lambda x: x[..., torch.tensor([0, 1]), :],
        lambda x: x.chunk(2, 2),
        lambda x: x.unbind(2),
        lambda x: x.repeat(1, 1, 2, 1),
        lambda x: x.repeat_interleave(2),
        lambda x: x.reshape(2, 3, 5, 4),
        lambda x: x.clone().__setitem__((slice(None), slice(None), 0), 0.0),
        lambda x: torch.zeros(2, 3, 4, 5).__setitem__(..., x),
        lambda x: x.clone().__setitem__(..., torch.ones(2, 3, 4, 5)),
        lambda x: F.group_norm(x.movedim(2, 1), 2),
        lambda x: F.conv2d(x.mT, ones(3, 3, 3, 3), padding=1),
        lambda x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT),
    ],
)
def test_what_goes_along_rows_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    x = _rows()
    function(x)
    with (
        RowShardedOps(_GROUPS, -2),
        pytest.raises(NotImplementedError, match=r"rows.*use vae.enable_tiling|cannot be split by rows: use"),
    ):
        function(x)


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
        lambda x: x.movedim(2, 0).mean(2).movedim(0, 2),
        lambda x: x + x.mean(1, keepdim=True) * ones(5),
        lambda x: x.flatten(2).transpose(1, 2).reshape(2, -1, 5, 3).movedim(-1, 1) - ones(3, 1, 1),
        lambda x: x.reshape(2, 3, -1, 2, 5).movedim(3, 2).flatten(1, 2).mean(1),
        lambda x: torch.stack([x, x], 2).flatten(1, 3).unflatten(1, (3, 2, -1)),
        lambda x: x.repeat(2, 1, 1, 1).repeat_interleave(2, 2).repeat_interleave(2, dim=3),
        lambda x: x.type_as(ones(7, 7)) + torch.zeros_like(x),
        lambda x: x[:, 1, :, 1:3][..., None, :, :],
        lambda x: x.to(ones(9, 9, 9)).unbind(1)[0].expand(3, -1, -1, -1),
    ],
)
def test_what_works_on_each_row_is_unchanged(function: Callable[[Tensor], Tensor]) -> None:
    """Each half of the rows gives its rows of the result, in the dim that was recorded."""
    x = _rows(8)
    halves = []
    for local in x.split(4, 2):
        set_row_dim(local, RowDim(2))
        with RowShardedOps(_GROUPS, -2):
            halves.append(function(local))
    rows = row_dim_of(halves[0])
    assert rows is not None
    assert rows == RowDim(rows.dim), "the dim holds rows only"
    torch.testing.assert_close(torch.cat(halves, rows.dim), function(x))


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


def test_a_reshape_of_no_frames_keeps_the_rows() -> None:
    # HunyuanVideo 1.5 divides rows and columns in two: [b, c, f, h, w] -> [b, c, f / 2, 2, h / 2, 2, w / 2, 2]
    before, after = torch.Size((1, 2, 0, 6, 4)), torch.Size((1, 2, 0, 2, 3, 2, 2, 2))
    assert _of_reshape("view", before, after, RowDim(3, 1)) == RowDim(4, 1)
    with pytest.raises(NotImplementedError, match="divides rows between dims"):
        _of_reshape("view", before, torch.Size((1, 2, 0, 5, 4)), RowDim(3, 1))
