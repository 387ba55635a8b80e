"""TCP stores for all ranks: they listen on the loopback interface if they can, and values are signed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_cp.errors import JobSecretError
from lightning_cp.job_secret import signed, verified
from lightning_cp.launch.rendezvous import listen_on_loopback


class JobStore:
    """A TCP store that the ranks of a job share. A value that no rank of the job has set is never returned."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def shared(cls, host: str, *, timeout: timedelta, names: Sequence[str] = ()) -> JobStore | None:
        """Start a store on rank 0 and connect all ranks to it. Returns: None on a rank that cannot connect.

        Args:
            host: address of rank 0 that all ranks can reach.
            timeout: time-out of a request.
            names: keys that `get_all` can read before they are set.
        Ranks: the whole world.
        """
        store: Any = host_store(host, timeout=timeout) if dist.get_rank() == 0 else None
        for name in names if store is not None else ():
            store.set(name, "")
        port = [0 if store is None else store.port]
        dist.broadcast_object_list(port, src=0)
        try:
            return cls(store or TCPStore(host, port[0], is_master=False, wait_for_workers=False, timeout=timeout))
        except RuntimeError:  # for instance a firewall
            return None

    @property
    def port(self) -> int:
        """Port of the store."""
        port: int = self._store.port
        return port

    def set(self, name: str, text: str) -> None:
        """Set a value."""
        self._store.set(name, signed(text.encode(), name))

    def get(self, name: str) -> str:
        """Wait for a value. Raises: JobSecretError: another process has set it. RuntimeError: time-out."""
        return verified(self._store.get(name), name).decode()

    def get_all(self, names: Sequence[str]) -> list[str | None]:
        """Return the values of some `names` of `shared`; None for those not set yet, or set by another process."""
        values: list[str | None] = []
        for name, value in zip(names, self._store.multi_get(names), strict=True):
            with suppress(JobSecretError):
                values.append(verified(value, name).decode())
                continue
            values.append(None)
        return values

    def add(self, name: str, number: int) -> int:
        """Add to a counter. Counters are not signed: another process can change them. Returns: the new value."""
        total: int = self._store.add(name, number)
        return total


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
    options: dict[str, Any] = {**settings, "master_listen_fd": descriptor}
    return TCPStore(host, port, is_master=True, **options)
