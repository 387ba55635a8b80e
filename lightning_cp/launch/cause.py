"""Find the rank that made a job fail. Imports no torch."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_cp.launch.job import Failure, FailureKind
from lightning_cp.launch.processes import Event, EventKind
from lightning_cp.launch.stalls import StallWarnings

# Parts of gloo, NCCL and TCPStore error messages about a lost peer.
_LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "DistNetworkError")


@dataclass
class History:
    """The events of a job's ranks so far.

    Attributes:
        done: ranks that returned from the target.
        heard: True once a rank has confirmed a stop request; a checkpoint will follow.
        stalls: prints the ranks' reports of stalled collectives.
    """

    events: list[Event] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    heard: bool = False
    stalls: StallWarnings = field(default_factory=StallWarnings)
    _reports: dict[int, Failure] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Record the next event."""
        self.events.append(event)
        if event.kind is not EventKind.SAID:
            return
        self.done |= {event.rank} if event.message.get("kind") == "done" else set()
        self.heard = self.heard or event.message.get("kind") == "heard"
        if event.message.get("kind") == "failure" and event.rank not in self._reports:
            report = _failure(event)
            if report is not None:
                self._reports[event.rank] = report

    def reports(self) -> list[Failure]:
        """Return the failures reported by ranks, in order of arrival."""
        return list(self._reports.values())

    def has_trouble(self, codes: Sequence[int | None]) -> bool:
        """Return True if a rank reported a failure, exited with an error, or left before its target returned."""
        left = any(event.kind is not EventKind.SAID and event.rank not in self.done for event in self.events)
        return bool(self._reports) or left or any(codes)

    def first_cause(self, codes: Sequence[int | None]) -> Failure | None:
        """Return the first failure, which may have caused the others.

        Args: codes: exit code of each rank, None for running ranks.
        Returns: None if no rank failed.
        """
        returned: list[int] = []
        for event in self.events:
            code, kind = codes[event.rank], event.message.get("kind")
            if kind == "done":
                returned.append(event.rank)
            elif kind == "failure" and event.rank in self._reports:
                return self._or_lost(self._reports[event.rank], returned)
            elif kind == "left":
                return ending(event.rank, code) if code else self._left_early(event.rank, codes)
            elif event.kind is EventKind.SAID or code is None:
                continue
            elif code:
                return ending(event.rank, code)
            elif event.rank not in self.done:
                return self._left_early(event.rank, codes)
        return None

    def _left_early(self, rank: int, codes: Sequence[int | None]) -> Failure | None:
        """Return the failure of a rank that exited with 0 without returning, or None if all ranks exited with 0."""
        if all(code == 0 for code in codes):
            return None
        message = f"rank {rank} ended with exit code 0 while other ranks were still at work: it called exit itself"
        return Failure(rank, FailureKind.EARLY, f"{message}{self._then(rank)}")

    def _or_lost(self, report: Failure, returned: Sequence[int]) -> Failure:
        """Replace the failure of a rank that lost a peer by the early return that caused it, if a peer had returned.

        Args: report: failure of the rank. returned: ranks that had returned from the target before.
        """
        others = [rank for rank in returned if rank != report.rank]
        if not others or report.kind is not FailureKind.RAISED or not any(x in report.message for x in _LOST_PEER):
            return report
        message = f"rank {others[0]} returned from the target while other ranks still waited for it"
        return replace(report, kind=FailureKind.EARLY, rank=others[0], message=f"{message}{self._then(others[0])}")

    def _then(self, rank: int) -> str:
        later = next((report for report in self._reports.values() if report.rank != rank), None)
        return "" if later is None else f". Then rank {later.rank} failed: {' '.join(later.message.split())[:500]}"


def ending(rank: int, code: int) -> Failure:
    """Describe the failure of a rank that ended without a report. Args: code: exit code, not 0; -n for signal n."""
    if code > 0:
        return Failure(rank, FailureKind.EXIT, f"rank {rank} ended with exit code {code}", exit_code=code)
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = "a real-time signal"
    return Failure(rank, FailureKind.SIGNAL, f"rank {rank} was ended by signal {-code} ({name})", exit_code=128 - code)


def _failure(event: Event) -> Failure | None:
    fields = event.message.get("failure")
    if not isinstance(fields, Mapping):
        return None
    try:
        return Failure.from_fields(fields)
    except (TypeError, ValueError):  # not written by `Failure.to_fields`
        return None
