"""What ranks and the coordinator send to each other, and the settings of a strict run.

A rank also sends an `Operation` when it posts it, and `Ended` and `Look` travel in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass


class StrictError(AssertionError):
    """Communication that could hang, or read or write the wrong values, with NCCL."""


@dataclass(frozen=True)
class Strict:
    """Settings of a strict run.

    Attributes:
        serial: a rank runs one operation at a time, over all its communicators, in the order in which it posts them, as
            with `CUDA_LAUNCH_BLOCKING=1` or with streams that share a hardware queue.
        sends_block: `wait` of an operation that only sends blocks the host. With NCCL it does not.
        backward_thread: run backward in a separate thread, as on CUDA.
    """

    serial: bool = False
    sends_block: bool = True
    backward_thread: bool = False


@dataclass(frozen=True)
class Transfer:
    """One send or receive of a batch.

    Attributes:
        peer: global rank. is_send: this rank sends. size: number of bytes. dtype: data type of the elements.
    """

    peer: int
    is_send: bool
    size: int
    dtype: str

    def __str__(self) -> str:
        return f"{'send to' if self.is_send else 'receive from'} {self.peer} ({self.size} bytes, {self.dtype})"


@dataclass(frozen=True)
class FirstUse:
    """The host blocks until all `members` have used this for the first time."""

    what: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"the first use of {self.what} by ranks {list(self.members)}"


@dataclass(frozen=True)
class Operation:
    """An operation that a rank has posted: a collective, or a batch of transfers.

    Attributes:
        number: identifies it on its rank.
        communicator: name of its communicator. members: global ranks of the communicator.
        kind: what it does, with all that must be equal on all ranks: size, data type, reduction, root. Empty: a batch.
        transfers: sends and receives of a batch.
        data: for a collective, the bytes for each member; for a batch, those of each transfer that sends.
        first_uses: what this rank uses for the first time with it.
        where: lines of code that posted it, innermost first.
    """

    number: int
    communicator: str
    members: tuple[int, ...]
    kind: str
    transfers: tuple[Transfer, ...] = ()
    data: tuple[bytes | None, ...] = ()
    first_uses: tuple[FirstUse, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        text = self.kind or f"batch [{', '.join(map(str, self.transfers))}]"
        return f"{text} on communicator {self.communicator}, posted at {self.where}"


@dataclass(frozen=True)
class Waits:
    """A rank waits until an operation is done, or until its first uses have happened on all members."""

    number: int
    for_first_use: bool


@dataclass(frozen=True)
class Ended:
    """A rank has ended its function; `error` if it has failed."""

    error: bool


@dataclass(frozen=True)
class Look:
    """A rank's state: it computes or has child processes; the stacks of its threads."""

    works: bool = False
    stacks: str = ""


@dataclass(frozen=True)
class Done:
    """An operation is done: the bytes from each member, or of each transfer that receives."""

    number: int
    data: tuple[bytes | None, ...]


@dataclass(frozen=True)
class Released:
    """The first uses of an operation have happened on all members."""

    number: int


@dataclass(frozen=True)
class Failed:
    """A fault was found: all ranks raise it."""

    text: str
