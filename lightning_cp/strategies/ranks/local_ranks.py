"""Let ranks that a strategy starts on this machine listen on the loopback interface only.

Lightning chooses a free port and closes it, and torch then listens there on every network interface. Here the process
that starts the ranks opens the listening socket on the loopback interface and passes it to rank 0.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_cp.launch.rendezvous import (
    LISTENER,
    init_at,
    is_loopback,
    listen,
    loopback_environment,
    take_listener,
)

_PORTS = ("MASTER_PORT", "STANDALONE_PORT")  # variables from which Lightning takes the port, in this order


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
        settings = {
            "timeout": strategy._timeout,
            "device_id": None if device.type == "cpu" else device,
        }
        backend = strategy._get_process_group_backend()
        address = (environment.main_address, environment.main_port)
        init_at(address, backend, rank=rank, ranks=strategy.num_processes, listener=descriptor, **settings)
        if "nccl" in backend:
            atexit.register(_destroy_process_group)  # as Lightning does


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
