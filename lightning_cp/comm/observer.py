"""The seam for dry runs, which count transfers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer that starts.

    Attributes:
        number: number of the transfer in this process, see `Pending.number`.
        group: its process group.
        sent, received: (rank within the group, buffer), also of this rank's own part of a collective.
    """

    number: int
    group: dist.ProcessGroup
    sent: tuple[tuple[int, Tensor], ...]
    received: tuple[tuple[int, Tensor], ...]


class TransferObserver(Protocol):
    """Called in the thread that communicates."""

    def started(self, transfer: Transfer) -> None:
        """A transfer starts: its buffers are in use until it was waited for."""

    def waited(self, number: int) -> None:
        """The wait for a transfer is over."""

    def gathered(self, values: list[int], group: dist.ProcessGroup) -> list[list[int]] | None:
        """Answer instead of the other ranks for `all_gather_ints`; None: ask them."""


class _Observed:
    observer: TransferObserver | None = None


OBSERVED = _Observed()


@contextmanager
def observing(observer: TransferObserver) -> Iterator[None]:
    """Tell `observer` of all transfers of this process in the context."""
    before, OBSERVED.observer = OBSERVED.observer, observer
    try:
        yield
    finally:
        OBSERVED.observer = before
