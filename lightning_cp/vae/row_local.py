"""Functions that give the same result on one rank's rows of an image as on the whole image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_cp.nest import tensors

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
