"""Let ranks that a strategy starts on this machine listen on the loopback interface only.

Lightning chooses a free port and closes it, and torch then listens there on every network interface. Here the process
that starts the ranks opens the listening socket on the loopback interface and passes it to rank 0.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_cp.job_secret import SECRET, new_secret
from lightning_cp.launch.rendezvous import (
    LISTENER,
    join_launcher,
    listen_on_loopback,
    loopback_environment,
    rendezvous_at,
    served_address,
    take_listener,
)

_PORTS = ("MASTER_PORT", "STANDALONE_PORT")  # variables from which Lightning takes the port, in this order


class LocalRanks:
    """The listening socket and the secret of a strategy's ranks. It is pickled with the strategy for spawned ranks.

    It is used only if Lightning starts all ranks on this machine. Nothing changes on several nodes, under torchrun,
    SLURM or another launcher, with a cluster environment other than Lightning's, or with `MASTER_ADDR` set to a network
    address.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._secret = ""

    def listen(self, environment: Any, *, num_nodes: int) -> None:
        """Open the socket, before ranks are started. Args: environment: Lightning's cluster environment.

        Raises: ValueError: `MASTER_PORT` is not a port, or is in use.
        """
        self.close()
        if num_nodes != 1 or type(environment) is not LightningEnvironment or os.name != "posix":
            return
        if environment.creates_processes_externally:
            return
        name = next((name for name in _PORTS if name in os.environ), None)
        port = os.environ[name] if name else "0"
        try:
            self._listener = listen_on_loopback(environment.main_address, int(port))
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{name or 'MASTER_PORT'}={port}: cannot listen on this port of {environment.main_address} ({error}): "
                f"set a free port from 1 to 65535, or unset the variable so that a free one is chosen"
            ) from error
        if self._listener is not None:
            environment._main_port = self._listener.getsockname()[1]
            self._secret = new_secret()

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
                os.environ.update({LISTENER: "-1", SECRET: self._secret})
            yield
        except BaseException:
            self.close()
            os.environ.pop(SECRET, None)
            raise
        finally:
            os.environ.pop(LISTENER, None)

    def join(self, environment: Any, *, num_nodes: int) -> None:
        """Prepare this rank's process group, which is created next. Ranks: the whole world."""
        if dist.is_initialized():
            self.close()
            return
        is_only_rank = self._listener is None and not take_listener(os.environ)
        if is_only_rank and (address := served_address()) is not None:
            if not environment.creates_processes_externally:  # one rank in this process, once more
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address
            return
        if is_only_rank:  # one rank in this process, unless another launcher has started it
            self.listen(environment, num_nodes=num_nodes)
        if is_only_rank and self._listener is None:
            return
        for name, interface in loopback_environment().items():
            os.environ.setdefault(name, interface)
        if self._listener is None:
            join_launcher()
            return
        if not is_only_rank:
            os.environ[SECRET] = self._secret
        descriptor = self._listener.detach() if environment.local_rank() == 0 else -1
        self.close()  # in the other ranks: their copies would keep the port open
        rendezvous_at(environment.main_address, str(environment.main_port), listener=descriptor)
