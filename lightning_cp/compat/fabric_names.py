"""Private names of `lightning.fabric`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.strategies import model_parallel
from lightning.fabric.utilities import imports

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
    "is_interactive",
    "loading_distributed_checkpoints_with",
    "optimizers_to_device",
]


def is_interactive() -> bool:
    """Return True in a notebook or another interactive session, as Lightning detects it."""
    with private_names("lightning"):
        return bool(imports._IS_INTERACTIVE)


@contextmanager
def loading_distributed_checkpoints_with(load: Callable[..., None]) -> Iterator[None]:
    """Make ModelParallelStrategy load sharded checkpoints with `load(state, path)` inside the context.

    Raises: IncompatibleVersionError: Lightning's function has another name, so its own would be called.
    """
    lightning: Any = model_parallel
    before = getattr(lightning, "_distributed_checkpoint_load", None)
    used_in = model_parallel._load_checkpoint.__code__.co_names
    if before is None or "_distributed_checkpoint_load" not in used_in:
        raise incompatible(
            "lightning", f"{model_parallel.__name__}._load_checkpoint calls no _distributed_checkpoint_load"
        )
    lightning._distributed_checkpoint_load = load
    try:
        yield
    finally:
        lightning._distributed_checkpoint_load = before
