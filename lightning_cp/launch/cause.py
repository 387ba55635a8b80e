"""Find the rank that made a job fail, and describe what ranks do in a stall. Imports no torch."""

import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_cp.comm.lost_connections import is_lost_connection
from lightning_cp.launch.job import Failure, FailureKind
from lightning_cp.launch.processes import Event, EventKind


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


@dataclass
class History:
    """The events of a job's ranks so far.

    Attributes:
        returned: ranks that returned from the target.
        stop_confirmed: True once a rank has confirmed a stop request; a checkpoint will follow.
        stalls: prints what the ranks do if a collective stalls.
    """

    events: list[Event] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)
    stop_confirmed: bool = False
    stalls: StallReports = field(default_factory=StallReports)
    _reports: dict[int, Failure] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Record the next event."""
        self.events.append(event)
        if event.kind is not EventKind.MESSAGE:
            return
        self.returned |= {event.rank} if event.message.get("kind") == "returned" else set()
        self.stop_confirmed = self.stop_confirmed or event.message.get("kind") == "stop_confirmed"
        if event.message.get("kind") == "failure":
            self._reports.setdefault(event.rank, Failure.from_fields(event.message["failure"]))

    def reports(self) -> list[Failure]:
        """Return the failures reported by ranks, in order of arrival."""
        return list(self._reports.values())

    def has_failure(self, codes: Sequence[int | None]) -> bool:
        """Return True if a rank reported a failure, exited with an error, or left before its target returned."""
        exited = any(event.kind is not EventKind.MESSAGE and event.rank not in self.returned for event in self.events)
        return bool(self._reports) or exited or any(codes)

    def first_cause(self, codes: Sequence[int | None]) -> Failure | None:
        """Return the first failure, which may have caused the others.

        Args: codes: exit code of each rank, None for running ranks.
        Returns: None if no rank failed.
        """
        returned: list[int] = []
        for event in self.events:
            code, kind = codes[event.rank], event.message.get("kind")
            if kind == "returned":
                returned.append(event.rank)
            elif kind == "failure" and event.rank in self._reports:
                return self._explain_lost_peer(self._reports[event.rank], returned)
            elif kind == "exited":
                return exit_failure(event.rank, code) if code else self._exited_early(event.rank, codes)
            elif event.kind is EventKind.MESSAGE or code is None:
                continue
            elif code:
                return exit_failure(event.rank, code)
            elif event.rank not in self.returned:
                return self._exited_early(event.rank, codes)
        return None

    def _exited_early(self, rank: int, codes: Sequence[int | None]) -> Failure | None:
        """Return the failure of a rank that exited with 0 without returning, or None if all ranks exited with 0."""
        if all(code == 0 for code in codes):
            return None
        message = f"rank {rank} exited with code 0 while other ranks were still running: it called sys.exit or os._exit"
        return Failure(rank, FailureKind.EARLY, f"{message}{self._next_failure(rank)}")

    def _explain_lost_peer(self, report: Failure, returned: Sequence[int]) -> Failure:
        """Replace the failure of a rank that lost a peer by the early return that caused it, if a peer had returned.

        Args: report: failure of the rank. returned: ranks that had already returned from the target.
        """
        others = [rank for rank in returned if rank != report.rank]
        if not others or report.kind is not FailureKind.RAISED or not is_lost_connection(report.message):
            return report
        message = f"rank {others[0]} returned from the target while other ranks were still waiting for it"
        return replace(
            report, kind=FailureKind.EARLY, rank=others[0], message=f"{message}{self._next_failure(others[0])}"
        )

    def _next_failure(self, rank: int) -> str:
        later = next((report for report in self._reports.values() if report.rank != rank), None)
        return "" if later is None else f". Then rank {later.rank} failed: {' '.join(later.message.split())[:500]}"


def lost_connection(report: Failure) -> Failure:
    """Replace the failure of a rank that lost another one by one sentence, for launchers that watch their own ranks."""
    if report.kind is not FailureKind.RAISED or not is_lost_connection(report.message):
        return report
    message = (
        f"rank {report.rank} lost the connection to another rank, which has exited or cannot be reached: the output of "
        "that rank has the cause"
    )
    return replace(report, kind=FailureKind.LOST, message=message)


def exit_failure(rank: int, code: int) -> Failure:
    """Describe the failure of a rank that ended without a report. Args: code: exit code, not 0; -n for signal n."""
    if code > 0:
        return Failure(rank, FailureKind.EXIT, f"rank {rank} ended with exit code {code}", exit_code=code)
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = "a real-time signal"
    return Failure(rank, FailureKind.SIGNAL, f"rank {rank} was ended by signal {-code} ({name})", exit_code=128 - code)
