"""Rendezvous of ranks on one machine, through the loopback interface only. Imports no torch.

With torch's `env://` rendezvous rank 0 listens on every network interface, so anybody who can reach this machine can
read and write the process group's store. Here the process that starts the ranks binds a port of 127.0.0.1, and rank 0
gets the listening socket: it inherits the socket, or it is that process. This also prevents other programs from taking
the port before rank 0 uses it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_cp.compat.versions import incompatible

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LISTENER = "LIGHTNING_CP_LISTENER"  # variable: descriptor of the listening socket in rank 0, -1 in the others
_MODULE = "torch.distributed.rendezvous"
_HOST = "127.0.0.1"
_BACKLOG = 1024  # ranks that may connect before rank 0 has imported torch
_taken: list[int] = []  # the launcher's descriptor, until it is used


def listen() -> socket.socket:
    """Open a listening socket on a free port of 127.0.0.1. Raises: OSError: there is no loopback interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((_HOST, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def listen_on_loopback(host: str, port: int = 0) -> socket.socket | None:
    """Open a listening socket if `host` is a loopback address.

    Args:
        host: name or address of this machine.
        port: port to listen at; 0: any free port.
    Returns: the socket; None if `host` is unknown or another address.
    Raises: OSError, OverflowError: the port is in use or out of range, or there is no loopback interface.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if not ipaddress.ip_address(address[0]).is_loopback:
            return None
    except (OSError, ValueError):
        return None
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


def rendezvous_environment(listener: socket.socket, rank: int) -> dict[str, str]:
    """Return the rendezvous variables of a rank for the socket `listener`; rank 0 must inherit its descriptor."""
    descriptor = listener.fileno() if rank == 0 else -1
    return {"MASTER_ADDR": _HOST, "MASTER_PORT": str(listener.getsockname()[1]), LISTENER: str(descriptor)}


def loopback_environment() -> dict[str, str]:
    """Return variables that make gloo and NCCL use the loopback interface; all ranks must be on this machine."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    return {} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}


def take_listener(environ: MutableMapping[str, str]) -> bool:
    """Take the launcher's socket over in a rank that was started with `rendezvous_environment`.

    Args: environ: environment variables of this process; the variable with the descriptor is removed.
    Returns: True if `join_launcher` will use a socket.
    """
    if LISTENER in environ:
        _taken.append(int(environ.pop(LISTENER)))
    return bool(_taken)


def join_launcher() -> None:
    """Make `env://` use the launcher's socket, if there is one. Call it before the process group is initialised."""
    if take_listener(os.environ):
        rendezvous_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], listener=_taken.pop())


def rendezvous_at(host: str, port: str, *, listener: int) -> None:
    """Make `env://` use a listening socket at `host` and `port`.

    Args:
        host, port: address of the rendezvous, as in `MASTER_ADDR` and `MASTER_PORT`.
        listener: descriptor of the listening socket in rank 0, which serves the store; -1 in the other ranks.
    Raises: IncompatibleVersionError: torch has no table of handlers; it would listen on every network interface.
    """
    if listener >= 0:
        os.set_inheritable(listener, False)
    handlers = getattr(import_module(_MODULE), "_rendezvous_handlers", None)
    if handlers is None:
        raise incompatible("torch", f"{_MODULE} has no _rendezvous_handlers, used to listen on the loopback interface")
    if "env" in handlers:
        handlers["env"] = _Rendezvous((host, port), listener, handlers["env"])


def served_address() -> tuple[str, str] | None:
    """Return host and port of the store that this process serves for `env://`; None if it serves none."""
    handler = getattr(sys.modules.get(_MODULE), "_rendezvous_handlers", {}).get("env")
    return handler.served_address() if isinstance(handler, _Rendezvous) else None


class _Rendezvous:
    """A torch rendezvous handler for `env://`.

    Args:
        address: the launcher's host and port. Other addresses in the environment go to torch's handler.
        listener: descriptor of the listening socket; -1 in ranks other than 0.
        default: torch's handler.
    """

    def __init__(self, address: tuple[str, str], listener: int, default: Any) -> None:
        self._address, self._listener, self._process, self._default = address, listener, os.getpid(), default
        # Kept until the process ends, because the socket can be passed to a store only once.
        self._store: TCPStore | None = None
        self._uses = 0

    def served_address(self) -> tuple[str, str] | None:
        """Return the address if this process serves the store. A forked process has this object, but not the server."""
        return self._address if self._listener >= 0 and self._process == os.getpid() else None

    def __call__(self, url: str, timeout: timedelta = timedelta(minutes=30), **settings: Any) -> Iterator[Any]:
        """Yield `(store, rank, world size)`, as torch's handlers do."""
        if (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) != self._address:
            yield from self._default(url, timeout=timeout, **settings)
            return
        from urllib.parse import parse_qs, urlparse

        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        query = parse_qs(urlparse(url).query)
        rank, world = (
            int(query[name][0] if name in query else os.environ[name.upper()]) for name in ("rank", "world_size")
        )
        store = self._connect(rank, world, timeout)
        self._uses += 1  # a new prefix gives each process group an empty store
        yield PrefixStore(f"group_{self._uses}", store), rank, world
        raise RuntimeError("the ranks of a local job cannot repeat their rendezvous: start a new job")

    def _connect(self, rank: int, world: int, timeout: timedelta) -> TCPStore:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self._store is not None:
            self._store.set_timeout(timeout)
            return self._store
        host, port = self._address[0], int(self._address[1])
        listener: dict[str, Any] = {"master_listen_fd": self._listener} if rank == 0 and self._listener >= 0 else {}
        self._store = TCPStore(host, port, world, rank == 0, timeout=timeout, **listener)
        return self._store
