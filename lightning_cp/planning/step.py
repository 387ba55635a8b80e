"""What one rank does in a step: the events of a dry run, and the memory at its peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from lightning_cp.config import RotateMethod, default_grid

Checkpointing = Literal["none", "full", "selective"]
# Kinds of memory at the peak of a step.
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Layout:
    """How ranks divide a step.

    Attributes:
        data, cfg, ring, ulysses: degrees; their product is the number of ranks.
        sharded: weights, gradients and optimizer states are sharded (FSDP2); False: every rank holds them.
        checkpointing: activation checkpointing of the blocks.
        rotate_method: how keys move around the ring, see `ContextParallelConfig`.
    """

    data: int = 1
    cfg: int = 1
    ring: int = 1
    ulysses: int = 1
    sharded: bool = False
    checkpointing: Checkpointing = "none"
    rotate_method: RotateMethod = "allgather"

    @property
    def columns(self) -> int:
        """Number of columns of the grid in which the ranks of a ring stand; 1 without rotate_method "grid"."""
        return default_grid(self.ring)[1] if self.rotate_method == "grid" else 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.cfg * self.ring * self.ulysses


@dataclass(frozen=True)
class Compute:
    """One operator on the compute stream.

    Attributes: moved_bytes: bytes read and written.
    """

    name: str
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class Start:
    """The start of a transfer.

    Attributes:
        number: counted from 1 in each part.
        link: name of the communicator.
        sent_bytes: what this rank sends.
        of_shards: it gathers sharded weights, or scatters their gradients.
        is_ahead: it begins without waiting for what was computed before: FSDP2's all-gather of the next weights.
    """

    number: int
    link: str
    sent_bytes: int
    of_shards: bool = False
    is_ahead: bool = False


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for a transfer.

    Attributes: number: number of its `Start`; 0 or less: in the part before, counted back from its last transfer; None:
        wait for all transfers so far.
    """

    number: int | None


Event = Compute | Start | Wait


@dataclass(frozen=True)
class Part:
    """Events that are repeated, for example those of all blocks of one kind. Attributes: repeats: how often."""

    name: str
    events: tuple[Event, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Step:
    """A dry run of one step of one rank.

    Attributes:
        layout: how ranks divide it.
        parts: its events, in order.
        peak: bytes at the peak of memory, by category.
        calls: calls into PyTorch by the host (operators and exchanges).
        at: name of the part with the peak of memory.
    """

    layout: Layout
    parts: tuple[Part, ...]
    peak: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    at: str = ""

    def events(self) -> Iterator[Event]:
        """Yield all events; transfers are numbered anew in each part, and in each repetition of one."""
        for part in self.parts:
            for _ in range(part.repeats):
                yield from part.events

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak of memory."""
        return sum(self.peak.values())

    @property
    def flops(self) -> int:
        """Floating-point operations of this rank."""
        return sum(x.flops for x in self.events() if isinstance(x, Compute))

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank sends, by link."""
        sent: defaultdict[str, int] = defaultdict(int)
        for event in self.events():
            if isinstance(event, Start):
                sent[event.link] += event.sent_bytes
        return dict(sent)
