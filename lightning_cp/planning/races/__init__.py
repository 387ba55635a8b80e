"""Check for races and deadlocks: trace all ranks in one process without a network, and compare their transfers."""

from lightning_cp.planning.races.check import check_ranks
from lightning_cp.planning.races.ranks import trace_all_ranks, trace_rank

__all__ = ["check_ranks", "trace_all_ranks", "trace_rank"]
