"""Running test functions on several ranks, and noticing what tests leave behind."""

from tests.harness.pool import RankFailure, RankPool

__all__ = ["RankFailure", "RankPool"]
