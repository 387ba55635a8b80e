"""TCP stores that listen only on their own address if it is a loopback address."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def host_store(host: str, *, timeout: timedelta) -> TCPStore:
    """Start a TCP store on a free port, for clients that connect to `host`.

    `TCPStore` listens on every network interface, regardless of its host. If `host` is a loopback address, all clients
    are on this machine, so the store listens on that address only.

    Args:
        host: name or address of this machine.
        timeout: time-out of a request.
    """
    listener = _listen_on_loopback(host)
    if listener is None:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    port, settings = listener.getsockname()[1], {"wait_for_workers": False, "timeout": timeout}
    descriptor = listener.detach()  # the store closes it
    given: dict[str, Any] = {**settings, "master_listen_fd": descriptor}
    return TCPStore(host, port, is_master=True, **given)


def _listen_on_loopback(host: str) -> socket.socket | None:
    """Open a listening socket if `host` is a loopback address; return None for other addresses."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if not ipaddress.ip_address(address[0]).is_loopback:
            return None
        listener = socket.socket(family, kind, protocol)
    except (OSError, ValueError):  # an unknown host: TCPStore reports it
        return None
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        return None
    return listener
