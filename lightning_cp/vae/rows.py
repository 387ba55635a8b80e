"""Functions of a VAE on an image that is sharded by rows: those that need other rows, and those that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_cp.comm.halo import fetch_halo
from lightning_cp.comm.shards import gather_shards, gather_uneven, sizes_in
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.engine.attention.stand_ins import original_of
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.nest import tensors


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
            return _REPLACED[func](self, func, *args, **kwargs)
        name = check_row_local(func, args, kwargs)
        result = func(*args, **kwargs)
        if name in _KEEP_HALO:
            _keep_halo(args, result)
        return result

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
    with RowShardedOps(groups, dim):
        out = forward(x.narrow(dim, sum(sizes[:rank]), sizes[rank]), *args[1:], **kwargs)
    mine = out if isinstance(out, Tensor) else out[0]
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
    """Compute attention of this rank's queries over the keys of all ranks, all-gathered in rank order.

    The order of the keys differs from one process, which does not change attention.

    Args:
        query, key, value: this rank's, [..., positions, head_dim].
        attn_mask: None, or an additive frame mask [..., positions, positions]: 0 if the key's frame is not after the
            query's frame. Positions are ordered by frame.
    Raises: NotImplementedError: any other mask, `is_causal`, or cross-attention.
    """
    groups = rows.groups
    assert groups.context is not None, "only several ranks gather keys"
    if kwargs.get("is_causal") or any(args[1:2]) or query.shape[-2] != key.shape[-2]:
        raise NotImplementedError(
            "causal attention and cross-attention of a VAE cannot be split by rows: use vae.enable_tiling()"
        )
    lengths = [n for (n,) in all_gather_ints([key.shape[-2]], group=groups.context)]
    if attn_mask is not None:
        attn_mask = _mask_of_frames(attn_mask, lengths)
    dim = key.ndim - 2
    keys, values = (gather_shards(x.contiguous(), dim, lengths, groups.name) for x in (key, value))
    return function(query, keys, values, attn_mask, *args, **kwargs)


def _mask_of_frames(mask: Tensor, lengths: list[int]) -> Tensor:
    """Extend a local frame mask to the positions of all ranks: [..., local, local] -> [..., local, all]."""
    first = mask[(0,) * (mask.ndim - 1)]  # the first query attends to its own frame only
    frame_length = int((first == 0).sum())
    assert frame_length, "the first position attends to no position"
    assert len(first) % frame_length == 0, (
        f"a mask over {len(first)} positions is not a mask of frames with {frame_length} positions"
    )
    frames = len(first) // frame_length
    by_frame = mask[..., ::frame_length, ::frame_length]
    for_queries = by_frame.repeat_interleave(frame_length, -2)
    if not torch.equal(for_queries.repeat_interleave(frame_length, -1), mask):
        raise NotImplementedError(
            "a VAE's attention mask can be split by rows only if it masks whole frames: use vae.enable_tiling()"
        )
    return torch.cat([for_queries.repeat_interleave(length // frames, -1) for length in lengths], -1)


def _group_norm(
    rows: RowShardedOps,
    function: Callable[..., Tensor],
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Apply `F.group_norm` to this rank's positions, with mean and variance over the positions of all ranks.

    mean = sum n_r mean_r / n;  var = sum n_r (var_r + (mean_r - mean)^2) / n, in float64

    Args:
        input: [b, c, ...]; the number of positions may differ between ranks.
        weight, bias: [c].
    Communication: all-gather of 3 numbers per sample and channel group.
    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm, 1979.
    """
    x, (batch, channels) = input, input.shape[:2]
    wide = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(x.reshape(batch, num_groups, -1).to(wide), dim=-1, correction=0)
    count = torch.full_like(mean, x[0, 0].numel() * (channels // num_groups), dtype=torch.float64)
    moments = torch.stack([count, mean.double(), var.double()])[None]
    counts, means, variances = gather_shards(moments, 0, [1] * rows.groups.context_size, rows.groups.name).unbind(1)
    fraction = counts / counts.sum(0)
    mean = (fraction * means).sum(0)
    var = (fraction * (variances + (means - mean).square())).sum(0)
    # Batch norm with one channel per (sample, channel): one pass over x, and no copy of x in a wider dtype.
    mean, var = (s.repeat_interleave(channels // num_groups, 1).flatten().to(wide) for s in (mean, var))
    scale, shift = (None if w is None else w.to(wide).repeat(batch) for w in (weight, bias))
    flat = x.reshape(1, batch * channels, -1)
    return F.batch_norm(flat, mean, var, scale, shift, training=False, eps=eps).reshape(x.shape)


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


# By name, without underscores at its ends: `mul` is also `mul_` and `__mul__`. All supported VAEs were run with these.
_ELEMENTWISE = """
    add radd iadd sub rsub isub mul rmul imul div rdiv idiv truediv rtruediv itruediv true_divide neg pow rpow ipow abs
    exp log sqrt rsqrt reciprocal square sigmoid tanh sin cos clamp clip maximum minimum where lerp addcmul addcdiv
    round     eq ne lt le gt ge logical_not logical_and logical_or isnan isfinite isinf nan_to_num masked_fill
    relu relu6 silu gelu mish elu selu leaky_relu hardtanh hardswish hardsigmoid softplus logsigmoid dropout
"""
_CHANNELS_OR_FRAMES = "linear layer_norm rms_norm normalize mean"  # with the arguments that `check_row_local` allows
_LAYOUT = """
    getitem setitem cat concat concatenate stack chunk split tensor_split unbind narrow select flatten unflatten reshape
    view view_as reshape_as permute transpose swapaxes swapdims movedim moveaxis squeeze unsqueeze expand expand_as
    repeat repeat_interleave contiguous clone detach copy fill zero alias t
"""
_TYPE_AND_DEVICE = """
    to type type_as float double half bfloat16 int long bool cpu cuda pin_memory is_pinned record_stream data_ptr
    requires_grad size dim ndimension numel nelement stride storage_offset element_size len bool item get set delete
    is_contiguous is_floating_point is_complex is_nonzero is_same_size get_device untyped_storage has_names hash
    has_compatible_shallow_copy_type parse_to is_tensor is_quantized is_conj is_neg is_inference repr format dir
"""
_NEW = """
    zeros ones empty full arange linspace tensor as_tensor zeros_like ones_like empty_like full_like new_zeros new_ones
    new_empty new_full new_tensor meshgrid finfo
"""
ROW_LOCAL = frozenset(" ".join((_ELEMENTWISE, _CHANNELS_OR_FRAMES, _LAYOUT, _TYPE_AND_DEVICE, _NEW)).split())


def check_row_local(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Check that a torch function may run on one rank's rows. VAEs call none of these along the rows.

    A function without a tensor among its arguments may run, unless it draws random numbers. `mean` must reduce
    one dim, and `layer_norm` and `rms_norm` the last one: VAEs reduce channels or frames with them.

    Args: function, args, kwargs: as in `__torch_function__`.
    Returns: its name, without underscores at its ends.
    Raises: NotImplementedError: it may need the rows of other ranks.
    """
    name = getattr(function, "__name__", str(function))
    plain = name.strip("_")
    has_tensor = next(tensors((*args, *kwargs.values())), None) is not None
    if plain in ROW_LOCAL or not (has_tensor or plain.startswith(("rand", "normal"))):
        second = args[1] if len(args) > 1 else None
        if plain == "mean" and not isinstance(kwargs.get("dim", second), int):
            name = f"{name} over {kwargs.get('dim', second) or 'all dims'}"
        elif plain in ("layer_norm", "rms_norm") and len(kwargs.get("normalized_shape", second) or ()) != 1:
            name = f"{name} over several dims"
        else:
            return plain
    raise NotImplementedError(
        f"{name} is not known to give the same result on one rank's rows of a VAE's image as on the whole image: use "
        "vae.enable_tiling(), or leave this VAE alone (vae=False)"
    )
