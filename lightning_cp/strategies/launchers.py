"""Start the ranks of a strategy on this machine: from scripts, notebooks and other interactive sessions.

Lightning chooses a free port and closes it, and torch then listens there on every network interface. Here the process
that starts the ranks opens the listening socket on the loopback interface and passes it to rank 0.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
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
from lightning_cp.launch.rendezvous import LISTENER, init_at, is_loopback, listen, loopback_environment, take_listener
from lightning_cp.launch.stall import stop_watch
from lightning_cp.mesh.groups import cached_groups
from lightning_cp.strategies.sweep_ranks import StartsScripts

_PORTS = ("MASTER_PORT", "STANDALONE_PORT")  # variables from which Lightning takes the port, in this order
# Keep destroyed process groups: freeing one in a forked process would hang, waiting for threads of the parent.
_KEPT_ALIVE: list[object] = []
START_METHODS = ("popen", "spawn", "fork", "forkserver")


class LocalRanks:
    """The listening socket of a strategy's ranks. It is pickled with the strategy for spawned ranks.

    It is used only if Lightning starts all ranks on this machine. Nothing changes on several nodes, under torchrun,
    SLURM or another launcher, with a cluster environment other than Lightning's, or with `MASTER_ADDR` set to a network
    address.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def listen(self, environment: Any, *, num_nodes: int) -> None:
        """Open the socket, before ranks are started. Args: environment: Lightning's cluster environment.

        Raises: ValueError: `MASTER_PORT` is not a port, or is in use.
        """
        self.close()
        if num_nodes != 1 or type(environment) is not LightningEnvironment or os.name != "posix":
            return
        if environment.creates_processes_externally or not is_loopback(environment.main_address):
            return
        name = next((name for name in _PORTS if name in os.environ), None)
        port = os.environ[name] if name else "0"
        try:
            self._listener = listen(environment.main_address, int(port))
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{name or 'MASTER_PORT'}={port}: cannot listen on this port of {environment.main_address} ({error}): "
                f"set a free port from 1 to 65535, or unset the variable so that a free one is chosen"
            ) from error
        environment._main_port = self._listener.getsockname()[1]

    def close(self) -> None:
        """Close this process's copy of the socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @contextmanager
    def for_processes(self, environment: Any, *, num_nodes: int) -> Iterator[None]:
        """Within this context, start all ranks as processes that receive this object. Rank 0 serves the store."""
        self.listen(environment, num_nodes=num_nodes)
        try:
            yield
        finally:
            self.close()

    @contextmanager
    def for_scripts(self, environment: Any, *, num_nodes: int) -> Iterator[None]:
        """Within this context, start the other ranks as scripts. This process becomes rank 0 and serves the store."""
        self.listen(environment, num_nodes=num_nodes)
        try:
            if self._listener is not None:
                os.environ[LISTENER] = "-1"
            yield
        except BaseException:
            self.close()
            raise
        finally:
            os.environ.pop(LISTENER, None)

    def join(self, strategy: Any) -> None:
        """Create the process group if the ranks are on this machine, else leave it to Lightning. Ranks: the world.

        Args: strategy: the Lightning strategy.
        """
        environment = strategy.cluster_environment
        if dist.is_initialized():
            self.close()
            return
        if self._listener is None:  # one rank in this process, unless another launcher has started it
            self.listen(environment, num_nodes=strategy.num_nodes)
        if self._listener is None and not take_listener(os.environ):
            return
        for name, interface in loopback_environment().items():
            os.environ.setdefault(name, interface)
        rank, device, descriptor = environment.local_rank(), strategy.root_device, -1
        if self._listener is not None and rank == 0:
            descriptor = self._listener.detach()
        self.close()  # in the other ranks: their copies would keep the port open
        settings = {"timeout": strategy._timeout, "device_id": None if device.type == "cpu" else device}
        backend = strategy._get_process_group_backend()
        address = (environment.main_address, environment.main_port)
        init_at(address, backend, rank=rank, ranks=strategy.num_processes, listener=descriptor, **settings)
        if "nccl" in backend:
            atexit.register(_destroy_process_group)  # as Lightning does


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


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
