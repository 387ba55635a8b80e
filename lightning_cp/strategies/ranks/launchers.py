"""Choose the start method of ranks: for scripts, and for notebooks and other interactive sessions."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_cp.compat import fabric_names
from lightning_cp.compat.fabric_names import is_interactive
from lightning_cp.compat.torch_names import in_bad_fork, process_groups
from lightning_cp.launch.stall import stop_watch
from lightning_cp.mesh.groups import cached_groups
from lightning_cp.strategies.ranks.sweep_ranks import StartsScripts

# Keep destroyed process groups: freeing one in a forked process would hang, waiting for threads of the parent.
_KEPT_ALIVE: list[object] = []
START_METHODS = ("popen", "spawn", "fork", "forkserver")


def check_start_method(start_method: object) -> None:
    """Check a start method. Raises: ValueError: Lightning has no such method."""
    if start_method is not None and start_method not in START_METHODS:
        raise ValueError(
            f"start_method={start_method!r} must be one of {', '.join(START_METHODS)}, or None: fork in a notebook, "
            "popen elsewhere"
        )


def choose_start_method(start_method: str | None, *, ranks: int, external: bool) -> str | None:
    """Choose the start method of ranks. Interactive sessions are detected by Lightning's check.

    Args:
        start_method: the user's choice; None: fork in an interactive session, popen elsewhere.
        ranks: world size.
        external: True if a launcher such as torchrun started the processes.
    Returns: one of `START_METHODS`; None: the only rank is this process.
    Raises: ValueError: a method that cannot work in an interactive session.
    """
    if external or not is_interactive():
        return "popen" if external or start_method is None else start_method
    if start_method is None and ranks == 1:
        return None
    if start_method not in (None, "fork") or "fork" not in torch.multiprocessing.get_all_start_methods():
        raise ValueError(
            f"start_method={start_method!r} cannot start {ranks} ranks from a notebook or another interactive session: "
            "only fork can, on Linux and macOS (leave start_method out). Otherwise run your code as a script, or use "
            "devices=1 with ring=1 and ulysses=1"
        )
    return "fork"


@contextmanager
def ready_to_launch(start_method: str, environment: Any, *, on_gpus: bool = False) -> Iterator[None]:
    """Prepare this process to launch ranks inside the context, with a new process group and port for each launch.

    The process group of an earlier run with one rank in this process is destroyed.

    Args:
        start_method: one of `START_METHODS` except popen.
        environment: Lightning's cluster environment.
        on_gpus: the ranks use GPUs.
    Raises: RuntimeError: forked processes could not use CUDA; or the world has several ranks.
    """
    if start_method in ("fork", "forkserver") and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            f"start_method={start_method!r} cannot start ranks after this process has used CUDA: a forked process "
            "cannot use it again. Restart the kernel and touch no GPU before the launch (no .cuda(), no .to('cuda'), "
            "no torch.cuda calls; build the model on the CPU), or run your code as a script"
        )
    if start_method == "fork" and on_gpus and _forked_process_loses_cuda():
        raise RuntimeError(
            "start_method='fork' cannot start ranks that use GPUs: a library, such as diffusers at its import, has "
            "asked for the GPUs in a way after which forked processes cannot use them. Restart the kernel and import "
            "lightning first, or set PYTORCH_NVML_BASED_CUDA_CHECK=1 before Python starts; or run your code as a script"
        )
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise RuntimeError(
                f"this process is already rank {dist.get_rank()} of {dist.get_world_size()}: start ranks from a "
                "process without a process group, or call torch.distributed.destroy_process_group() before"
            )
        stop_watch()
        _KEPT_ALIVE.extend(process_groups())
        dist.destroy_process_group()
        os.environ.pop("MASTER_PORT", None)  # the old store may still listen there
    _KEPT_ALIVE.extend(cached_groups())  # includes a process group that the user has destroyed
    before = os.environ.get("MASTER_PORT")
    if before is None and isinstance(environment, LightningEnvironment):
        environment._main_port = -1
    gc.collect()
    gc.freeze()  # forked processes must not collect objects of this one
    try:
        yield
    finally:
        gc.unfreeze()
        if before is None:  # set by Lightning; the next launch would take it for the user's setting
            os.environ.pop("MASTER_PORT", None)


def _forked_process_loses_cuda() -> bool:
    """Fork a process that only tells whether CUDA refuses it: this process cannot know."""
    child = os.fork()
    if not child:
        os._exit(in_bad_fork())
    return os.waitpid(child, 0)[1] != 0


class StartsProcesses:
    """Base of the launchers of processes: prepare this process, and let ranks listen on the loopback interface only."""

    _start_method: Any
    _strategy: Any

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function on all ranks. Raises: RuntimeError: see `ready_to_launch`."""
        environment, nodes = self._strategy.cluster_environment, self._strategy.num_nodes
        with (
            ready_to_launch(self._start_method, environment, on_gpus=self._strategy.root_device.type == "cuda"),
            self._strategy.local_ranks.for_processes(environment, num_nodes=nodes),
        ):
            return super().launch(function, *args, **kwargs)  # type: ignore[misc]


class MultiProcessingLauncher(StartsProcesses, fabric_names.MultiProcessingLauncher):
    """Fabric's launcher of processes."""


class ScriptLauncher(StartsScripts, fabric_names.SubprocessScriptLauncher):
    """Fabric's launcher of scripts."""
