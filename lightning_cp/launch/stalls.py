"""Print the ranks' warnings about stalled collectives on the launcher's terminal. Imports no torch."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class StallWarnings:
    """Print one warning per stall, even if several ranks report it."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def show(self, message: Mapping[str, Any], pids: Sequence[int]) -> None:
        """Print a warning to stderr, unless one was printed for the same stall.

        Args:
            message: a rank's report: `text`, and `after_s`, the seconds until a stall is reported. Other ranks report
                the same stall within that time; a second stall takes longer.
            pids: process ids in rank order.
        """
        text, after_s = message.get("text"), message.get("after_s")
        now = time.monotonic()
        if not isinstance(text, str) or not isinstance(after_s, int | float) or now < self._quiet_until:
            return
        self._quiet_until = now + after_s
        stopped = [rank for rank, pid in enumerate(pids) if is_stopped(pid)]
        lines = [
            f"rank {rank} (process {pids[rank]}) is stopped: kill -CONT {pids[rank]} continues it" for rank in stopped
        ]
        print("\n  ".join([text, *lines]), file=sys.stderr, flush=True)


def is_stopped(pid: int) -> bool:
    """Return True if a signal or a debugger has stopped the process; False if the system has no such information."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
