"""Describe a stall by what each rank waits for. Imports no torch."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RankStatus:
    """What a rank does: `where`, for how many seconds, and whether it waits for other ranks."""

    where: str
    unchanged_s: float
    waits: bool


class StallReports:
    """The newest status of each rank of a launcher; a stall is printed once."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[float, RankStatus]] = {}
        self._is_reported = False

    def add(self, rank: int, message: Mapping[str, Any], pids: Sequence[int]) -> None:
        """Take a status that a rank has sent, and print what all ranks do if it waits.

        Args:
            message: the fields of `RankStatus`; `tick_s`, the seconds between two statuses of a rank; `timeout_s`.
            pids: process ids in rank order.
        """
        status = RankStatus(message["where"], message["unchanged_s"], message["waits"])
        _, before = self._latest.get(rank, (0.0, None))
        now = time.monotonic()
        self._latest[rank] = (now, status)
        recent = {each: one for each, (at, one) in sorted(self._latest.items()) if now - at < 4 * message["tick_s"]}
        if not any(one.waits for one in recent.values()):
            self._is_reported = False
        # One status after the wait began, the statuses of the other ranks have arrived.
        elif status.waits and before is not None and before.waits and not self._is_reported:
            self._is_reported = True
            missing = [each for each in range(len(pids)) if each not in recent]
            lines = [f"{name_ranks(missing)} sent no status: busy, exited or frozen"] if missing else []
            lines += [
                f"rank {each} (process {pid}) is stopped: kill -CONT {pid} continues it"
                for each, pid in enumerate(pids)
                if is_stopped(pid)
            ]
            print(describe_stall(recent, message["timeout_s"], lines), file=sys.stderr, flush=True)


def describe_stall(statuses: Mapping[int, RankStatus], timeout_s: float, others: Iterable[str]) -> str:
    """Return the text of a stall. Args: statuses: by rank. others: lines about ranks without a status."""
    waiting: dict[str, list[int]] = {}
    running: dict[str, list[int]] = {}
    for rank, status in statuses.items():
        (waiting if status.waits else running).setdefault(status.where, []).append(rank)
    longest = max(status.unchanged_s for status in statuses.values() if status.waits)
    return "\n  ".join(
        [
            f"warning: a collective has not ended for {longest:.0f} s (time-out: {timeout_s:.0f} s)",
            *(f"{name_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} {where}" for where, ranks in waiting.items()),
            *(f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {where}" for where, ranks in running.items()),
            *others,
        ]
    )


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 1" or "ranks 1, 2", shortened."""
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


def is_stopped(pid: int) -> bool:
    """Return True if a signal or a debugger has stopped the process; False if the system has no such information."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
