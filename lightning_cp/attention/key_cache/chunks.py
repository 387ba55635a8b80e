"""The chunks of a sequence that a cache keeps: their order, their positions, and the window of each."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_cp.errors import ShapeError


@dataclass(frozen=True)
class Chunk:
    """A chunk of a sequence.

    Attributes:
        number: index of the chunk, from 0.
        start: position of its first token in the sequence.
        sizes: number of its tokens on each rank, in rank order.
    """

    number: int
    start: int
    sizes: tuple[int, ...]

    def positions(self, rank: int) -> Tensor:
        """Return the positions of a rank's tokens, int64 on the host."""
        first = self.start + sum(self.sizes[:rank])
        return torch.arange(first, first + self.sizes[rank], device="cpu")


@dataclass
class Chunks:
    """The chunks that are kept, in the order of time.

    Attributes:
        window: number of chunks to which a chunk attends, itself included; None: all.
        sinks: number of first chunks to which all chunks attend.
    """

    window: int | None
    sinks: int
    kept: list[Chunk] = field(default_factory=list)

    def start_of(self, number: int) -> int:
        """Return the position at which a chunk starts. Raises: ShapeError: it is neither the latest chunk nor next."""
        latest = self.kept[-1] if self.kept else None
        following = 0 if latest is None else latest.number + 1
        if latest is not None and number == latest.number:
            return latest.start
        if number != following:
            again = f", or {following - 1} again," if following else ""
            raise ShapeError(
                f"chunk={number} cannot follow the {following} chunks of this cache: append chunk {following}{again} "
                "or call reset() for another sample"
            )
        return 0 if latest is None else latest.start + sum(latest.sizes)

    def left_by(self, number: int) -> list[Chunk]:
        """Return the kept chunks to which a chunk does not attend, and the chunk itself."""
        return [chunk for chunk in self.kept if chunk.number not in self._attended_by(number)]

    def before(self, number: int) -> list[Chunk]:
        """Return the kept chunks before a chunk."""
        return [chunk for chunk in self.kept if chunk.number < number]

    def again(self, number: int) -> Chunk:
        """Return a chunk that is computed again. Raises: ShapeError: a chunk to which it attends was dropped."""
        found = [chunk for chunk in self.kept if chunk.number == number]
        if not found or [chunk.number for chunk in self.before(number)] != self._attended_by(number):
            raise ShapeError(
                f"chunk={number} is recomputed in backward, but this cache has dropped chunks to which it attends: "
                "call backward before later chunks are appended, or do not checkpoint this block"
            )
        return found[0]

    def _attended_by(self, number: int) -> list[int]:
        """Return the numbers of the earlier chunks to which a chunk attends."""
        first = 0 if self.window is None else max(number - self.window + 1, 0)
        return [n for n in range(number) if n < self.sinks or n >= first]
