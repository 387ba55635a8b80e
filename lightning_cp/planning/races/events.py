"""What one rank does with the buffers of its transfers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

Spans = tuple[tuple[int, int], ...]  # (first byte, byte after the last) in a storage


class Communicator(NamedTuple):
    """A process group, the same value on all of its ranks. Attributes: number: among the groups of these ranks."""

    ranks: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}" + (f", group {self.number}" if self.number else "")


class Channel(NamedTuple):
    """Way from one rank to another, on which messages arrive in the order in which they were sent."""

    communicator: Communicator
    is_collective: bool
    source: int
    target: int


class Buffer(NamedTuple):
    """Bytes that are sent to, or received from, a peer. Attributes: storage: address of the storage."""

    peer: int
    storage: int
    start: int
    stop: int


@dataclass(frozen=True)
class Started:
    """A transfer starts.

    Attributes: number: number among this rank's transfers, from 1. operator: operator of this package that starts it.
    """

    number: int
    communicator: Communicator
    operator: str
    is_collective: bool
    sent: tuple[Buffer, ...]
    received: tuple[Buffer, ...]

    def __str__(self) -> str:
        operator = f"{self.operator}, " if self.operator else ""
        return f"transfer {self.number} ({operator}{self.communicator})"

    def channel(self, rank: int, peer: int, *, sends: bool) -> Channel:
        """Return the channel to or from a peer."""
        source, target = (rank, peer) if sends else (peer, rank)
        return Channel(self.communicator, self.is_collective, source, target)


@dataclass(frozen=True)
class Waited:
    """The wait for a transfer is over."""

    number: int


@dataclass(frozen=True)
class Access:
    """An operator reads or writes bytes of a storage that is in flight."""

    operator: str
    storage: int
    spans: Spans
    writes: bool


@dataclass(frozen=True)
class Released:
    """A storage in flight is no longer kept. Attributes: how: what happened to it."""

    number: int
    how: str


@dataclass(frozen=True)
class Misread:
    """An operator reads another tensor than its argument's name says.

    Attributes: number: number of the last transfer.
    """

    operator: str
    argument: str
    found: str
    number: int


Event = Started | Waited | Access | Released | Misread


@dataclass
class Trace:
    """Events of one rank.

    Attributes:
        rank: its rank in the world.
        events: in order.
        gathered: lists of ints that the rank gave to `all_gather_ints`, by communicator, in order.
        messages: bytes that the rank sent, by channel, in order.
        result: result of the traced function.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    gathered: dict[Communicator, list[list[int]]] = field(default_factory=dict)
    messages: dict[Channel, list[bytes]] = field(default_factory=dict)
    result: object = None


def spans_of(x: Tensor) -> Spans:
    """Return the bytes of a tensor in its storage."""
    item, offsets = x.element_size(), np.array([x.storage_offset()])
    if x.is_contiguous():
        return ((int(offsets[0]) * item, (int(offsets[0]) + x.numel()) * item),)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = np.unique(offsets[:, None] + np.arange(size) * stride)
    runs = np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1)
    return tuple((int(run[0]) * item, (int(run[-1]) + 1) * item) for run in runs if len(run))
