"""Process groups of ranks on one machine, through the loopback interface only. Importing needs no torch.

With torch's `env://` rendezvous rank 0 listens on every network interface, so anybody who can reach this machine can
read and write the process group's store. Here the process that starts the ranks binds a port of 127.0.0.1, and rank 0
gets the listening socket: it inherits the socket, or it is that process. This also prevents other programs from taking
the port before rank 0 uses it.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from typing import Any

LISTENER = "LIGHTNING_CP_LISTENER"  # variable: descriptor of the listening socket in rank 0, -1 in the others
_HOST = "127.0.0.1"
_BACKLOG = 1024  # ranks that may connect before rank 0 has imported torch
_JOB_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_taken: list[int] = []  # the launcher's descriptor, then -1
_stores: dict[tuple[str, int], tuple[Any, Iterator[int]]] = {}  # by address, with the number of uses so far


def listen(host: str = _HOST, port: int = 0) -> socket.socket:
    """Open a listening socket.

    Args:
        host: loopback name or address.
        port: port to listen at; 0: any free port.
    Raises: OSError, OverflowError: the port is in use or out of range, or there is no loopback interface.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # on Windows the option would allow two listeners at one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run may linger
        listener.bind((address[0], port, *address[2:]))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


def is_loopback(host: str) -> bool:
    """Return True if `host` is the name or address of a loopback interface."""
    try:
        return ipaddress.ip_address(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]).is_loopback
    except (OSError, ValueError):
        return False


def rendezvous_environment(listener: socket.socket, rank: int) -> dict[str, str]:
    """Return the rendezvous variables of a rank for the socket `listener`; rank 0 must inherit its descriptor."""
    descriptor = listener.fileno() if rank == 0 else -1
    return {"MASTER_ADDR": _HOST, "MASTER_PORT": str(listener.getsockname()[1]), LISTENER: str(descriptor)}


def loopback_environment() -> dict[str, str]:
    """Return variables that make gloo and NCCL use the loopback interface; all ranks must be on this machine."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    return {} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}


def job_id() -> str:
    """Return the id that torchrun or SLURM has given this job; "" without one. Ranks of two jobs may meet at a port."""
    return next((f"{name}={os.environ[name]}" for name in _JOB_IDS if name in os.environ), "")


def take_listener(environ: MutableMapping[str, str]) -> bool:
    """Take the launcher's socket over in a rank that was started with `rendezvous_environment`.

    Args: environ: environment variables of this process; the variable with the descriptor is removed.
    Returns: True if this process is a rank of a launcher on this machine.
    """
    if LISTENER in environ:
        _taken.append(int(environ.pop(LISTENER)))
    return bool(_taken)


def init_process_group(backend: str, **settings: Any) -> None:
    """Create the world's process group as `torch.distributed` does, at the launcher's socket if it has handed one over.

    Args: backend, settings: as for `torch.distributed.init_process_group`, with rank and world size from the
        environment variables.
    Ranks: the whole world.
    """
    if take_listener(os.environ):
        address, rank = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["RANK"])
        init_at(address, backend, rank=rank, ranks=int(os.environ["WORLD_SIZE"]), **settings)
        return
    from torch.distributed import init_process_group

    init_process_group(backend, **settings)


def init_at(
    address: tuple[str, int],
    backend: str,
    *,
    rank: int,
    ranks: int,
    listener: int = -1,
    timeout: timedelta | None = None,
    **settings: Any,
) -> None:
    """Create the world's process group with a store that rank 0 serves at a loopback address.

    Args:
        address: host and port.
        listener: descriptor of the listening socket, in rank 0; -1: that of the launcher.
        backend, timeout, settings: as for `torch.distributed.init_process_group`.
    """
    from torch.distributed import PrefixStore, TCPStore, init_process_group  # type: ignore[attr-defined]

    patience = timeout or timedelta(minutes=30)
    if address not in _stores:
        options: dict[str, Any] = {}
        if rank == 0:
            listener = listener if listener >= 0 else _taken[-1]
            os.set_inheritable(listener, False)
            options["master_listen_fd"] = listener  # the store closes it
        _stores[address] = TCPStore(*address, ranks, rank == 0, timeout=patience, **options), itertools.count()
        _taken.append(-1)
    store, uses = _stores[address]
    store.set_timeout(patience)
    fresh = PrefixStore(f"group_{next(uses)}", store)  # without the keys of an earlier group
    init_process_group(backend, store=fresh, rank=rank, world_size=ranks, timeout=timeout, **settings)
