"""Run test functions on several ranks, and detect processes, threads and settings that a test leaves behind."""

from tests.harness.pool import RankFailure, RankPool

__all__ = ["RankFailure", "RankPool"]
