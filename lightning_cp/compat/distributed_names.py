"""Private names of torch's DTensor, DCP and FSDP2. The import takes seconds.

Parts of FSDP2 are changed on one sharded module: nothing global is replaced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.fsdp import FSDPModule

from lightning_cp.compat.torch_names import tree_iter
from lightning_cp.compat.versions import private_names

with private_names("torch"):
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.checkpoint.filesystem import _StoragePrefix
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.serialization import _get_layout

# Names of classes and functions, as `dcp_index` finds them in an index.
STORAGE_INFO = StorageInfo.__name__
GET_LAYOUT = _get_layout.__name__
MEMORY_FORMAT = _MEM_FORMAT_ENCODING.__name__
MEMORY_FORMATS = tuple(member.name for member in _MEM_FORMAT_ENCODING)

# Names in the index that DCP pickles: they are compared with the file's names, and never called.
PICKLED_NAMES = (
    f"{filesystem.__name__}.{StorageInfo.__name__}",
    f"{filesystem.__name__}.{_StoragePrefix.__name__}",
    f"{_get_layout.__module__}.{_get_layout.__name__}",
)

__all__ = [
    "GET_LAYOUT",
    "MEMORY_FORMAT",
    "MEMORY_FORMATS",
    "PICKLED_NAMES",
    "STORAGE_INFO",
    "StorageInfo",
    "accumulate_in_one_dtype",
    "allow_returned_views",
    "changed_weight",
    "compute_local_shape_and_global_offset",
    "free_gathered",
    "gathered_weights",
    "renew_fsdp_dtypes",
    "reshard_without_grad",
]


def allow_returned_views(unit: FSDPModule) -> None:
    """Omit the warning of a unit that it returned a view. Warning filters would not last: `catch_warnings` undoes them.

    The unit runs a copy of torch's function that has another global `warnings`.
    """
    state: Any = unit._get_fsdp_state()
    original = type(state)._register_pre_backward_hook
    scope = {**original.__globals__, "warnings": SimpleNamespace(warn=_warn)}
    copied = FunctionType(original.__code__, scope, original.__name__, original.__defaults__, original.__closure__)
    state._register_pre_backward_hook = MethodType(copied, state)


def accumulate_in_one_dtype(unit: FSDPModule) -> None:
    """Let a unit reduce weights that get their first gradient in the last micro-batch of an accumulation.

    With a `reduce_dtype`, FSDP2 keeps accumulated gradients in it, and new ones in the dtype of the weights. It cannot
    reduce both together. So convert the new ones first; a weight without a gradient still gets none.
    """
    for group in _weight_groups(unit):
        group.post_backward = partial(_reduce_in_one_dtype, group, group.post_backward)


def reshard_without_grad(unit: FSDPModule) -> None:
    """Let a unit free gathered weights after a forward without a graph, also with `reshard_after_forward=False`.

    No backward would free them, and what is then changed in the module would change copies.
    """
    for group in _weight_groups(unit):
        group.post_forward = partial(_post_forward, group, group.post_forward)


def free_gathered(unit: FSDPModule) -> None:
    """Free a unit's gathered weights, also after a forward that failed, when `reshard` may keep them."""
    for group in _weight_groups(unit):
        group._to_sharded()


def changed_weight(unit: FSDPModule) -> str | None:
    """Describe a sharded weight that was cast, moved or replaced since the first forward; None: there is none."""
    for group in _weight_groups(unit):
        for one in group.fsdp_params:
            x: nn.Parameter = one.sharded_param
            device = "cpu" if one.offload_to_cpu else group.device.type
            if not hasattr(one, "_unsharded_param"):
                continue  # no forward yet
            if (x.dtype, x.device.type) != (one.orig_dtype, device):
                return f"cast or moved (to {x.dtype} on {x.device.type})"
            module, name = one._module_info.module, one._module_info.param_name
            if not any(module._parameters.get(name) is known for known in (x, one._unsharded_param)):
                return f"replaced ({name} of {type(module).__name__})"
    return None


def renew_fsdp_dtypes(unit: FSDPModule) -> None:
    """Read the dtypes in which FSDP2 reduces gradients again. It reads them before the first forward only.

    Raises: AssertionError: the trained weights of the unit have several dtypes.
    """
    for group in _weight_groups(unit):
        group._init_mp_dtypes()


def gathered_weights(unit: FSDPModule) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return each sharded weight of a unit with the whole one that graphs hold; none before the first forward."""
    weights = [one for group in _weight_groups(unit) for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
    return [(one.sharded_param, one._unsharded_param) for one in weights]


def _weight_groups(unit: FSDPModule) -> list[Any]:
    """Return the groups of weights that the unit gathers together; none if all its weights are in other units."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # newer versions of torch
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def _reduce_in_one_dtype(group: Any, reduce_gradients: Callable[..., None], *arguments: Any) -> None:
    if any(one.unsharded_accumulated_grad is not None for one in group.fsdp_params):
        for one in group.fsdp_params:
            if one.unsharded_accumulated_grad is None and hasattr(one, "_unsharded_param"):
                one.to_accumulated_grad_if_needed()
    reduce_gradients(*arguments)


def _post_forward(group: Any, post_forward: Callable[..., Any], *arguments: Any) -> Any:
    output = post_forward(*arguments)
    if not torch.is_grad_enabled() or not any(getattr(x, "requires_grad", False) for x in tree_iter(output)):
        group.reshard()
    return output


def _warn(message: str, category: type[Warning] | None = None, stacklevel: int = 1) -> None:
    if "returned a view tensor" not in message:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
