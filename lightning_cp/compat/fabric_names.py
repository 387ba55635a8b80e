"""Private names of `lightning.fabric`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import ModuleType
from typing import Any

from lightning.fabric import wrappers
from lightning.fabric.strategies import model_parallel
from lightning.fabric.utilities import imports
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.nn import Module
from torch.optim import Optimizer

from lightning_cp.compat.versions import incompatible, private_names

with private_names("lightning"):
    from lightning.fabric.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from lightning.fabric.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )
    from lightning.fabric.strategies.model_parallel import _ParallelBackwardSyncControl as ParallelBackwardSyncControl
    from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device

__all__ = [
    "MultiProcessingLauncher",
    "ParallelBackwardSyncControl",
    "SubprocessScriptLauncher",
    "as_fabric_backward",
    "is_interactive",
    "keeping_optimizers_without_state",
    "loading_distributed_checkpoints_with",
    "loading_optimizers_with",
    "optimizers_to_device",
]


def is_interactive() -> bool:
    """Return True in a notebook or another interactive session, as Lightning detects it."""
    with private_names("lightning"):
        return bool(imports._IS_INTERACTIVE)


@contextmanager
def as_fabric_backward() -> Iterator[None]:
    """Let outputs of Fabric's modules compute gradients, which they refuse outside of `fabric.backward`."""
    with private_names("lightning"):
        before, wrappers._in_fabric_backward = wrappers._in_fabric_backward, True
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before


@contextmanager
def loading_distributed_checkpoints_with(load: Callable[..., None]) -> Iterator[None]:
    """Make ModelParallelStrategy load sharded checkpoints with `load(state, path)` inside the context.

    Raises: IncompatibleVersionError: Lightning's function has another name, so its own would be called.
    """
    with _calling(model_parallel, "_distributed_checkpoint_load", load):
        yield


@contextmanager
def loading_optimizers_with(load: Callable[..., None]) -> Iterator[None]:
    """Make ModelParallelStrategy load optimizers with `load` inside the context, instead of `set_optimizer_state_dict`.

    `load` gets the states as they were saved. Lightning would name numbered ones by the order of the module's
    parameters, which may not be the order in which the optimizer got them.

    Raises: IncompatibleVersionError: Lightning's functions have other names, so its own would be called.
    """

    def keep(state: dict[str, Any], _: Module) -> dict[str, Any]:
        return state

    with (
        _calling(model_parallel, "_rekey_optimizer_state_if_needed", keep),
        _calling(torch_state_dict, "set_optimizer_state_dict", load),
    ):
        yield


@contextmanager
def keeping_optimizers_without_state() -> Iterator[None]:
    """Let torch return the state of an optimizer that has not stepped as it is, inside the context.

    Torch would make a step without gradients first, which Adam counts: to save would change the training.

    Raises: IncompatibleVersionError: torch's function has another name, so its own would be called.
    """

    def leave(_: Optimizer) -> None:
        pass

    with _calling(torch_state_dict, "_init_optim_state", leave, by="_get_optim_state_dict"):
        yield


@contextmanager
def _calling(module: ModuleType, name: str, function: Callable[..., Any], *, by: str = "") -> Iterator[None]:
    """Make a caller call `function` in place of the function of this name: `by`, or Lightning's `_load_checkpoint`."""
    before = getattr(module, name, None)
    caller: Any = getattr(module, by, None) if by else model_parallel._load_checkpoint
    code = getattr(unwrap(caller), "__code__", None)
    if before is None or code is None or name not in (*code.co_names, *code.co_varnames):
        package = "torch" if by else "lightning"
        raise incompatible(package, f"{by or '_load_checkpoint'} calls no {module.__name__}.{name}")
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)
