"""Private names of torch. Modules that import torch anyway import these from here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from inspect import unwrap
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from lightning_cp.compat.versions import incompatible, private_names

with private_names("torch"):
    import torch.utils.checkpoint as _checkpoint
    from torch._C import DispatchKey
    from torch._C import _after_ADInplaceOrView_keyset as below_autograd_keys
    from torch._C import _are_functorch_transforms_active as torch_func_is_active
    from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd
    from torch._C import _cuda_endAllocateToPool as end_allocation_to_pool
    from torch._C import _current_graph_task_id as graph_task_id
    from torch._C import _disabled_torch_dispatch_impl as no_torch_dispatch
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._subclasses.fake_tensor import is_fake
    from torch.autograd.forward_ad import _set_fwd_grad_enabled as set_forward_ad
    from torch.jit._builtins import _find_builtin, _register_builtin
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.nn.modules.dropout import _DropoutNd as DropoutModule
    from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_map, tree_map_only, tree_unflatten

    # What `checkpoint` itself calls: since torch 2.14 the function with the second name. The first one is for others.
    stores_recomputation: Callable[..., Any] = vars(_checkpoint).get(
        "_checkpoint_without_reentrant_generator_impl", _checkpoint._checkpoint_without_reentrant_generator
    )
    module_call_code = torch.nn.Module._call_impl.__code__
    lerp_all_ = torch._foreach_lerp_
    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

__all__ = [
    "DispatchKey",
    "DropoutModule",
    "StorageWeakRef",
    "TorchDispatchMode",
    "TreeSpec",
    "address_of",
    "aten",
    "autograd_functions",
    "below_autograd",
    "below_autograd_keys",
    "default_timeout",
    "end_allocation_to_pool",
    "fake_store",
    "fake_tensors",
    "fake_world",
    "forward_ad_level",
    "function_modes",
    "get_unwrapped",
    "has_global_hooks",
    "in_backward",
    "in_bad_fork",
    "is_exporting",
    "is_fake",
    "is_functional",
    "is_functorch_wrapped_tensor",
    "is_traceable_wrapper_subclass",
    "lerp_all_",
    "make_wrapper_subclass",
    "module_call_code",
    "no_torch_dispatch",
    "peek_interpreter_stack",
    "process_groups",
    "run_body",
    "schema_of",
    "script_as",
    "set_forward_ad",
    "set_timeout",
    "shared_store",
    "stores_recomputation",
    "take_default_timeout",
    "temporarily_clear_interpreter_stack",
    "torch_func_is_active",
    "tree_flatten",
    "tree_iter",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "without_dispatch_modes",
]


@cache
def aten(name: str) -> Callable[..., Any]:
    """Return a private operator of aten. Raises: IncompatibleVersionError: this torch has no such operator."""
    try:
        operator: Callable[..., Any] = getattr(torch.ops.aten, name)
        return operator
    except AttributeError as error:
        raise incompatible("torch", f"it has no operator aten.{name}") from error


def autograd_functions() -> dict[CodeType, str]:
    """Return the names of all autograd functions, by the code of their forward: `apply` may have no Python frame."""
    kinds: list[Any] = [torch.autograd.Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    codes = {getattr(unwrap(kind.forward), "__code__", None): kind.__name__ for kind in reversed(kinds[1:])}
    return {code: name for code, name in codes.items() if code is not None}


def is_exporting() -> bool:
    """Return True inside of torch.export. (torch 2.11's function is also True in code that torch.compile traces.)"""
    return torch.compiler._is_exporting_flag


def is_functional(operator: Any) -> bool:
    """Return True if an operator of aten only computes one new tensor: no change of an argument, no random number."""
    schema = operator._schema
    returns_tensor = [str(x.type) for x in schema.returns] == ["Tensor"]
    aliases = any(x.alias_info is not None for x in (*schema.returns, *schema.arguments))
    return returns_tensor and not aliases and torch.Tag.nondeterministic_seeded not in operator.tags


def in_backward() -> bool:
    """Return True if autograd runs a backward in this thread."""
    return graph_task_id() != -1


def script_as(stand_in: Any, original: Any) -> None:
    """Let TorchScript compile the original function in the place of a stand-in."""
    operator = _find_builtin(original)  # type: ignore[no-untyped-call]
    if operator is None:
        stand_in.__prepare_scriptable__ = lambda: original
    else:
        _register_builtin(stand_in, operator)


def forward_ad_level() -> int:
    """Return the innermost level of forward derivatives that is active; -1 if none is."""
    return forward_ad._current_level


def in_bad_fork() -> bool:
    """Return True in a process that cannot use CUDA because the one it was forked from has asked CUDA for devices."""
    return bool(torch.cuda._is_in_bad_fork())


def process_groups() -> list[Any]:
    """Return all process groups of this process."""
    return list(torch.distributed.distributed_c10d._world.pg_map)


def default_timeout() -> timedelta:
    """Return the time-out of `init_process_group`."""
    world = torch.distributed.distributed_c10d._get_default_group()
    timeout: timedelta = world._get_backend(world._device_types[0]).options._timeout
    return timeout


def shared_store(name: str) -> Any:
    """Return a part of the store at which the ranks of the world have met. Args: name: the same on all ranks."""
    c10d: Any = torch.distributed.distributed_c10d
    return c10d.PrefixStore(name, c10d._get_default_store())


def take_default_timeout(group: torch.distributed.ProcessGroup) -> None:
    """Give a group the time-out of `init_process_group`, which torch does not pass on to gloo groups."""
    set_timeout(default_timeout(), group)


def set_timeout(timeout: timedelta, group: torch.distributed.ProcessGroup) -> None:
    """Set the time-out of a process group. (Public since torch 2.14.)"""
    c10d: Any = torch.distributed.distributed_c10d
    (c10d.set_timeout if hasattr(c10d, "set_timeout") else c10d._set_pg_timeout)(timeout, group)


def fake_store() -> Any:
    """Return a store for the process group backend "fake", which sends nothing."""
    with private_names("torch"):
        from torch.testing._internal.distributed.fake_pg import FakeStore
    return FakeStore()


@contextmanager
def fake_tensors(*, allow_real: bool = False) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Context in which tensors have shapes, dtypes and devices, but no storage. Yields a function that makes a copy.

    Reading a value, or a shape that depends on values, raises an exception of torch. Nothing is logged inside.

    Args: allow_real: operators also take tensors with storage.
    """
    with private_names("torch"):
        from torch._subclasses.fake_tensor import FakeTensorMode
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), FakeTensorMode(allow_non_fake_inputs=allow_real) as mode:
            mode.cache_enabled = allow_real  # torch would keep the results of each shape for ever
            yield mode.from_tensor
    finally:
        if allow_real:
            FakeTensorMode.cache_clear()
        logging.disable(before)


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """Create a default process group of `ranks` ranks, in which this process is `rank`; destroyed at the end."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_body(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function that a custom operator is made of, so that the active dispatch mode sees what it calls."""
    return operator._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator: its name, arguments and results."""
    return operator._schema


def address_of(storage: Any) -> int:
    """Return the address of the object behind a storage, also of one without memory."""
    address: int = storage._cdata
    return address
