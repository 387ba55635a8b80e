"""Record which dim of a tensor holds this rank's rows; refuse functions along that dim and unknown ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_cp.nest import tensors

_DIM_ARGUMENT = {"mean": (1, None), "normalize": (2, 1), "cat": (1, 0), "concat": (1, 0), "concatenate": (1, 0)}
_ALONG_LAST = ("linear", "layer_norm", "rms_norm")
_VIEWS = (
    "getitem",
    "narrow",
    "select",
    "unbind",
    "chunk",
    "split",
    "tensor_split",
    "permute",
    "transpose",
    "swapaxes",
    "swapdims",
    "movedim",
    "moveaxis",
    "squeeze",
    "unsqueeze",
    "expand",
    "expand_as",
    "t",
    "get",
)
_RESHAPES = ("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten")


class RowDim(NamedTuple):
    """Dim of a tensor that holds the rows.

    Attributes:
        dim: number of the dim, not negative.
        outer: number of frames, if frames and rows were flattened to this dim; otherwise 1.
    """

    dim: int
    outer: int = 1


def row_dim_of(x: Any) -> RowDim | None:
    """Return where a tensor has rows; None for one without rows, such as a weight."""
    return getattr(x, "_row_dim", None)


def set_row_dim(marked: Tensor, rows: RowDim | None) -> None:
    """Record where a tensor has rows."""
    marked._row_dim = rows  # type: ignore[attr-defined]


def row_dim_of_result(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> RowDim | tuple[RowDim, ...] | None:
    """Return where the result of a function has rows: one `RowDim` or None, or a tuple with one for each result.

    Args:
        name: name of the function, without underscores at its ends.
        function, args, kwargs: arguments of `__torch_function__`.
        result: the tensor, or tuple of tensors, that it returned.
    Raises: NotImplementedError: the function mixes rows, takes some of them, or combines rows with a tensor that has
        one value for each local row but was not split by rows.
    """
    operands = list(tensors(args[:1] if name == "to" or name.endswith("_as") else (*args, *kwargs.values())))
    sources = [x for x in operands if row_dim_of(x)]
    if sources and name == "setitem":
        _check_assignment(*args)
    if not sources or name.startswith("new_") or next(tensors(result), None) is None:
        return None
    x, rows = sources[0], row_dim_of(sources[0])
    assert rows is not None, "it is one of those with rows"
    if name in _VIEWS:
        return _of_view(name, function, x, args, kwargs)
    if name in _RESHAPES:
        return _of_reshape(name, x.shape, result.shape, rows)
    if name in _ALONG_LAST:
        return rows if rows.dim < x.ndim - 1 and args[0] is x else _refuse(name, "along the rows")
    if name == "repeat":
        return _of_repeat(x, result, rows)
    if name == "repeat_interleave":
        return rows if result.ndim == x.ndim else _refuse(name, "over all dims")
    if name == "stack":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % result.ndim
        return RowDim(_common(name, operands).dim + (dim <= rows.dim), rows.outer)
    if name not in _DIM_ARGUMENT:
        return _common(name, operands, result)
    position, default = _DIM_ARGUMENT[name]
    dim = kwargs.get("dim", args[position] if len(args) > position else default)
    dim = dim if dim is None else dim % x.ndim
    if dim is None or dim == rows.dim:
        _refuse(name, "along the rows")
    if name == "mean":
        return RowDim(rows.dim - (dim < rows.dim and result.ndim < x.ndim), rows.outer)
    return _common(name, operands)


def _common(name: str, operands: list[Tensor], result: Tensor | None = None) -> RowDim:
    """Return where the result of broadcasting has rows. Raises: NotImplementedError: they differ between operands."""
    dims = max(x.ndim for x in operands) if result is None else result.ndim
    return _broadcast(name, [(x.shape, row_dim_of(x)) for x in operands], dims)


def _broadcast(name: str, operands: list[tuple[torch.Size, RowDim | None]], dims: int) -> RowDim:
    row_dims = {(rows.dim - len(shape), rows.outer) for shape, rows in operands if rows is not None}
    (dim, outer), *others = row_dims  # dim counts from the last one
    whole = [shape for shape, rows in operands if rows is None and len(shape) >= -dim and shape[dim] != 1]
    if others or whole:
        _refuse(name, "of rows and of a tensor that is not split by rows in the same dim")
    return RowDim(dims + dim, outer)


def _check_assignment(target: Tensor, index: Any, value: Any) -> None:
    """Check `target[index] = value`. Raises: NotImplementedError: some rows are taken, or mixed with a whole tensor."""
    if row_dim_of(target) is None:
        _refuse("setitem", "of rows in a tensor that is not split by rows")
    rows = _of_view("setitem", Tensor.__getitem__, target, (target, index), {})
    assert isinstance(rows, RowDim), "an index gives one tensor"
    if isinstance(value, Tensor):
        shape = torch.empty(target.shape, device="meta")[index].shape
        _broadcast("setitem", [(shape, rows), (value.shape, row_dim_of(value))], len(shape))


def _of_view(
    name: str, function: Callable[..., Any], x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RowDim | tuple[RowDim, ...]:
    """Find the row dim of a view: call the function on a tensor without memory that has a stride for rows only."""
    rows = row_dim_of(x)
    assert rows is not None, "only such tensors are viewed here"
    strides = [int(dim == rows.dim) for dim in range(x.ndim)]
    probe = torch.empty(0, device="meta").as_strided(x.shape, strides)
    views = function(*(probe if value is x else value for value in args), **kwargs)
    row_dims = []
    for view in (views,) if isinstance(views, Tensor) else views:
        dims = [dim for dim in range(view.ndim) if view.stride(dim) and view.shape[dim] > 1]
        if len(dims) != 1 or view.stride(dims[0]) != 1 or view.shape[dims[0]] != x.shape[rows.dim]:
            _refuse(name, "that takes or moves some of the rows")
        row_dims.append(RowDim(dims[0], rows.outer))
    return row_dims[0] if isinstance(views, Tensor) else tuple(row_dims)


def _of_reshape(name: str, before: torch.Size, after: torch.Size, rows: RowDim) -> RowDim:
    """Find the row dim by the number of elements in front of the rows, which a reshape does not change."""
    if 0 in before[: rows.dim]:  # no frames, for example: by those from the rows on
        ends = {math.prod(after[dim:]): dim for dim in range(len(after))}
        dim = ends.get(math.prod(before[rows.dim :]))
        return _refuse(name, "that divides rows between dims") if dim is None else RowDim(dim, rows.outer)
    outer = math.prod(before[: rows.dim]) * rows.outer
    size_before = before[rows.dim] // rows.outer
    preceding = 1
    for dim, size in enumerate(after):
        following = preceding * size
        if preceding <= outer < following and outer % preceding == 0:
            size_after = following // outer
            if size_after % size_before == 0 or size_before % size_after == 0:  # [h, 2] -> [2 h], or [h] -> [h / 2, 2]
                return RowDim(dim, outer // preceding)
        preceding = following
    return _refuse(name, "that divides rows between dims")


def _of_repeat(x: Tensor, result: Tensor, rows: RowDim) -> RowDim:
    dim = rows.dim + result.ndim - x.ndim
    return RowDim(dim, rows.outer) if result.shape[dim] == x.shape[rows.dim] else _refuse("repeat", "of the rows")


def _refuse(name: str, what: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} {what} gives another result on one rank's rows of a VAE's image than on the whole image: use "
        "vae.enable_tiling(), or leave this VAE alone (vae=False)"
    )


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
    """Check that a torch function may run on one rank's rows; `row_dims` refuses functions along the rows.

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
