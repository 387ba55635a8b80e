"""TCP stores that listen only on their own address if it is a loopback address."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_cp.comm.rendezvous import listen_on_loopback


def host_store(host: str, *, timeout: timedelta) -> TCPStore:
    """Start a TCP store on a free port, for clients that connect to `host`.

    `TCPStore` listens on every network interface, regardless of its host. If `host` is a loopback address, all clients
    are on this machine, so the store listens on that address only.

    Args:
        host: name or address of this machine.
        timeout: time-out of a request.
    """
    try:
        listener = listen_on_loopback(host)
    except OSError:  # no loopback interface
        listener = None
    if listener is None:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    port, settings = listener.getsockname()[1], {"wait_for_workers": False, "timeout": timeout}
    descriptor = listener.detach()  # the store closes it
    given: dict[str, Any] = {**settings, "master_listen_fd": descriptor}
    return TCPStore(host, port, is_master=True, **given)
