"""Which operations of a communicator can run together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.harness.strict.messages import Operation, StrictError


@dataclass
class Running:
    """An operation on its rank's queue. `received`: the bytes of each transfer that is done."""

    rank: int
    operation: Operation
    received: dict[int, bytes | None] = field(default_factory=dict)


def check_equal(a: Running, b: Running) -> None:
    """Check that two operations that run on one communicator can run together."""
    kinds = (a.operation.kind, b.operation.kind)
    if all(kinds) and kinds[0] != kinds[1]:
        raise StrictError(f"ranks {a.rank} and {b.rank} run different collectives:\n  {a.operation}\n  {b.operation}")
    for one, other in ((a, b), (b, a)):
        waits = [t for i, t in enumerate(one.operation.transfers) if i not in one.received and t.peer == other.rank]
        if other.operation.kind and waits:
            raise StrictError(
                f"rank {one.rank} runs a transfer with rank {other.rank}, which runs a collective:\n"
                f"  {one.operation}\n  {other.operation}"
            )


def matched(a: Running, on: dict[int, Running]) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number of each receive of `a` whose send runs now, and its data; the send is marked as done."""
    for number, receive in enumerate(a.operation.transfers):
        b = on.get(receive.peer)
        if receive.is_send or number in a.received or b is None:
            continue
        for i, send in enumerate(b.operation.transfers):
            if send.is_send and send.peer == a.rank and i not in b.received:
                if (send.size, send.dtype) != (receive.size, receive.dtype):
                    raise StrictError(
                        f"rank {b.rank} sends {send.size} bytes of {send.dtype}, but rank {a.rank} receives "
                        f"{receive.size} bytes of {receive.dtype}:\n  {b.operation}\n  {a.operation}"
                    )
                b.received[i] = None
                yield number, b.operation.data[i]
                break
