"""What is compared: the same work done by one process, by us in each mode, and by others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_cp.config import ContextParallelConfig

ONE_THREAD, ALL_THREADS = "one process, one thread", "one process, all threads"
ALONE = "one process"  # on a GPU
UNCHECKED = ", check_peers=off"  # after a mode's name: the same, without comparing arguments between ranks
QUERIES_CALL, HEADS_CALL = "one call: its queries", "one call: its heads"  # a rank's share, nothing sent


@dataclass(frozen=True)
class Subject:
    """One way to do a workload's step.

    Attributes:
        name: as in the table.
        build: called on every rank that takes part; gives the step. What it raises is told instead of figures.
        alone: only the first rank takes part.
        threads: of the CPU, for the step; 0: as they are.
        is_peer: it is another library's.
    """

    name: str
    build: Callable[[], Callable[[], object]]
    alone: bool = False
    threads: int = 0
    is_peer: bool = False


def modes(ranks: int) -> dict[str, ContextParallelConfig]:
    """Our modes on so many ranks."""
    found = {
        "ring allgather": ContextParallelConfig(ring_degree=ranks),
        "ring alltoall": ContextParallelConfig(ring_degree=ranks, rotate_method="alltoall"),
        "Ulysses": ContextParallelConfig(ulysses_degree=ranks),
    }
    if ranks >= 4 and ranks % 2 == 0:
        found["unified"] = ContextParallelConfig(ring_degree=2, ulysses_degree=ranks // 2)
    return found
