"""Convolution, padding, norms and attention of a VAE on an image that is sharded by rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_cp.comm.halo import fetch_halo
from lightning_cp.comm.shards import gather_uneven, sizes_in
from lightning_cp.engine.attention.stand_ins import original_of
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.vae.all_rows import attend_all_rows, group_norm_of_all_rows
from lightning_cp.vae.row_dims import RowDim, check_row_local, row_dim_of, row_dim_of_result, set_row_dim


class RowShardedOps(TorchFunctionMode):
    """Torch function mode in which tensors [..., height, width] are shards of rows (of columns if `dim` is -1).

    Functions that need more than one row are replaced; all others run unchanged on the local rows. The mode is
    active in this thread and this `with` block only.

    Raises: NotImplementedError: a function that is not known to work on each row, or on channels and frames alone
        (`check_row_local`), and has no sharded version.
    Ranks: all of the context group. Gradient: none, sampling only.
    """

    def __init__(self, groups: MeshGroups, dim: int) -> None:
        super().__init__()
        self.groups, self.dim = groups, dim

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _REPLACED:
            rows: RowDim | tuple[RowDim, ...] | None = self._checked(func, *(args or kwargs.values()))
            result = _REPLACED[func](self, func, *args, **kwargs)
        else:
            name = check_row_local(func, args, kwargs)
            result = func(*args, **kwargs)
            rows = row_dim_of_result(name, func, args, kwargs, result)
            if name in _KEEP_HALO:
                _keep_halo(args, result)
        for x, one in [(result, rows)] if isinstance(rows, RowDim) else zip(result, rows) if rows else ():
            set_row_dim(x, one)
        return result

    def _checked(self, func: Callable[..., Any], x: Tensor, *_: Any) -> RowDim:
        """Return where the first argument of a replaced function has rows.

        Raises: NotImplementedError: not in the dim in which the replacement expects them.
        """
        rows = row_dim_of(x)
        if func is F.group_norm:
            expected = rows is not None and rows.dim >= 2
        elif _REPLACED.get(func) is _attend:
            expected = rows is not None and rows.dim == x.ndim - 2
        else:
            expected = rows == RowDim(x.ndim + self.dim)
        if rows is None or not expected:
            raise NotImplementedError(
                f"{func.__name__} of a tensor with other dims than [..., height, width] cannot be split by rows: use "
                "vae.enable_tiling(), or leave this VAE alone (vae=False)"
            )
        return rows

    @property
    def at_end(self) -> tuple[bool, bool]:
        """Return (True if this rank holds the first rows, True if it holds the last rows)."""
        return self.groups.context_rank == 0, self.groups.context_rank == self.groups.context_size - 1


def reach_of(module: nn.Module) -> int:
    """Return the widest halo of the module's convolutions: half the largest spatial kernel size, in rows."""
    kernels = [size for x in module.modules() if isinstance(x, (nn.Conv2d, nn.Conv3d)) for size in x.kernel_size[-2:]]
    return max(kernels, default=1) // 2


def by_rows(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    groups: MeshGroups,
    min_steps: int,
    step: int,
) -> Any:
    """Compute `forward(*args, **kwargs)` by rows: shard the first argument, all-gather the (first) result.

    Args:
        forward: function to compute.
        args: positional arguments; the first one is x [b, c, (f,) h, w], split along the longer of height and width.
        kwargs: keyword arguments.
        groups: context group of the ranks.
        min_steps: minimum number of steps per rank; with fewer, every rank computes the whole input.
        step: rows per step. They stay on one rank, because they become one row of the result.
    Ranks: all of the context group; the result is bitwise equal on all.
    """
    x = args[0]
    dim = -2 if x.shape[-2] >= x.shape[-1] else -1
    steps, rest = divmod(x.shape[dim], step)
    steps_by_rank = sizes_in(groups, steps)
    if min(steps_by_rank) < min_steps:
        return forward(*args, **kwargs)
    sizes = [size * step for size in steps_by_rank]
    sizes[-1] += rest
    rank = groups.context_rank
    x_local = x.narrow(dim, sum(sizes[:rank]), sizes[rank])
    set_row_dim(x_local, RowDim(x.ndim + dim))
    with RowShardedOps(groups, dim):
        out = forward(x_local, *args[1:], **kwargs)
    mine = out if isinstance(out, Tensor) else out[0]
    if row_dim_of(mine) != RowDim(mine.ndim + dim):
        raise NotImplementedError(
            "the result of this VAE has its rows in another dim than its input: use vae.enable_tiling()"
        )
    whole = gather_uneven(mine.contiguous(), dim, groups)
    return whole if isinstance(out, Tensor) else (whole, *out[1:])


def _extend(rows: RowShardedOps, x: Tensor, before: int, after: int, zeros: tuple[int, int]) -> Tensor:
    """Add halos of `before` and `after` rows to `x`; at the ends of the image, `zeros` rows of zeros instead."""
    above, below = fetch_halo(x, x.ndim + rows.dim, before, after, groups=rows.groups)
    shape = list(x.shape)
    pieces = [x]
    for piece, at_end, count, index in ((above, rows.at_end[0], zeros[0], 0), (below, rows.at_end[1], zeros[1], 2)):
        if at_end and count:
            shape[rows.dim] = count
            piece = x.new_zeros(shape)
        if piece is not None:
            pieces.insert(index, piece)
    return torch.cat(pieces, rows.dim) if len(pieces) > 1 else x


def _convolve(
    rows: RowShardedOps,
    function: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve a shard of rows with halos.

    A shard begins at a multiple of the stride, so its output rows are aligned with those of the whole image.
    """
    if isinstance(padding, str):
        raise NotImplementedError(
            f"a convolution with padding={padding!r} cannot be split by rows: use vae.enable_tiling()"
        )
    strides, paddings, dilations = (_each(x, weight.ndim - 2) for x in (stride, padding, dilation))
    pad, step = paddings[rows.dim], strides[rows.dim]
    beyond = dilations[rows.dim] * (weight.shape[rows.dim] - 1) + 1 - step  # halo rows that the output needs
    if pad:
        input = _extend(rows, input, pad, max(0, beyond - pad), (pad, pad))
        paddings[rows.dim] = 0
    else:  # the input was padded by `_pad`, or no halo is needed
        spare = getattr(input, "halo_rows", 0) - beyond
        assert beyond <= 0 or 0 <= spare < step, f"a convolution over rows needs {beyond} more than were padded"
    return function(input, weight, bias, strides, paddings, dilations, groups)


def _pad(
    rows: RowShardedOps,
    function: Callable[..., Tensor],
    input: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    """Pad at the ends of the image; at inner borders use halos of the neighbouring ranks' rows."""
    first = 2 * (-1 - rows.dim)
    before, after = pad[first : first + 2] if len(pad) >= first + 2 else (0, 0)
    if input.ndim < 4 or not (before or after):
        padded = function(input, pad, mode, value)
        _keep_halo((input,), padded)
        return padded
    assert min(before, after) >= 0, "a negative padding crops"
    extended = _extend(rows, input, before, after, (0, 0))
    mine = list(pad)
    mine[first : first + 2] = [n if at_end else 0 for n, at_end in zip((before, after), rows.at_end, strict=True)]
    padded = function(extended, mine, mode, value)
    _set_halo(padded, before + after)
    return padded


def _set_halo(x: Tensor, rows: int) -> None:
    """Record that a tensor has so many rows more than its shard, for a convolution without padding."""
    x.halo_rows = rows  # type: ignore[attr-defined]


def _keep_halo(args: tuple[Any, ...], result: Any) -> None:
    """Record the halo of a padded tensor on its frames, or on the frames of several concatenated."""
    operands = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
    halos = {getattr(x, "halo_rows", 0) for x in operands if isinstance(x, Tensor)} - {0}
    for x in (result,) if isinstance(result, Tensor) else result if halos else ():
        for rows in halos:
            _set_halo(x, rows)


def _interpolate(
    rows: RowShardedOps,
    function: Callable[..., Tensor],
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Interpolate without a halo: keep the rows (factor 1), or repeat them (mode nearest, integer factor)."""
    if input.ndim >= 4:
        sizes = size if scale_factor is None else scale_factor
        along = sizes[rows.dim] if isinstance(sizes, (list, tuple)) else sizes
        factor = along / input.shape[rows.dim] if scale_factor is None else along
        if factor != 1 and (not mode.startswith("nearest") or factor != int(factor)):
            raise NotImplementedError(
                f"interpolation by {factor} with mode={mode!r} cannot be split by rows: use vae.enable_tiling()"
            )
    return function(input, size, scale_factor, mode, *args, **kwargs)


def _group_norm(
    rows: RowShardedOps,
    function: Callable[..., Tensor],
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return group_norm_of_all_rows(input, num_groups, weight, bias, eps=eps, groups=rows.groups)


def _attend(
    rows: RowShardedOps,
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    return attend_all_rows(function, (query, key, value), attn_mask, (args, kwargs), groups=rows.groups)


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values if len(values) == dims else values * dims


_KEEP_HALO = ("getitem", "narrow", "split", "chunk", "cat", "concat", "concatenate", "clone", "contiguous", "to")
_REPLACED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch.conv2d: _convolve,
    torch.conv3d: _convolve,
    F.pad: _pad,
    F.interpolate: _interpolate,
    F.group_norm: _group_norm,
    original_of(F.scaled_dot_product_attention): _attend,
}
