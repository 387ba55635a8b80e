"""Which rank made a job fail. Imports no torch."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_cp.launch.job import Failure, FailureKind
from lightning_cp.launch.processes import Event, EventKind
from lightning_cp.launch.stalls import StallWarnings

# Words of gloo, NCCL and the store about a peer that has gone.
_LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "DistNetworkError")


@dataclass
class History:
    """What happened to the ranks of a job so far.

    Attributes:
        done: ranks whose target has returned.
        heard: whether a rank was asked to stop and will write a checkpoint.
        stalls: prints what ranks report about collectives that do not end.
    """

    events: list[Event] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    heard: bool = False
    stalls: StallWarnings = field(default_factory=StallWarnings)
    _reports: dict[int, Failure] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take note of the next event."""
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
        """The failures that ranks reported, the first first."""
        return list(self._reports.values())

    def has_trouble(self, codes: Sequence[int | None]) -> bool:
        """Whether a rank reported a failure, ended badly, or is ending though its target has not returned."""
        left = any(event.kind is not EventKind.SAID and event.rank not in self.done for event in self.events)
        return bool(self._reports) or left or any(codes)

    def first_cause(self, codes: Sequence[int | None]) -> Failure | None:
        """The failure that came first, from which the others may have followed.

        Args: codes: exit codes of the ranks, None for those that run.
        Returns: None where no rank failed.
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
        """A rank that ended with exit code 0 and without returning: right only if all ranks do so."""
        if all(code == 0 for code in codes):
            return None
        message = f"rank {rank} ended with exit code 0 while other ranks were still at work: it called exit itself"
        return Failure(rank, FailureKind.EARLY, f"{message}{self._then(rank)}")

    def _or_lost(self, report: Failure, returned: Sequence[int]) -> Failure:
        """The failure of a rank that lost a peer follows from one whose target returned before. `returned`: those."""
        others = [rank for rank in returned if rank != report.rank]
        if not others or report.kind is not FailureKind.RAISED or not any(x in report.message for x in _LOST_PEER):
            return report
        message = f"rank {others[0]} returned from the target while other ranks still waited for it"
        return replace(report, kind=FailureKind.EARLY, rank=others[0], message=f"{message}{self._then(others[0])}")

    def _then(self, rank: int) -> str:
        later = next((report for report in self._reports.values() if report.rank != rank), None)
        return "" if later is None else f". Then rank {later.rank} failed: {' '.join(later.message.split())[:500]}"


def ending(rank: int, code: int) -> Failure:
    """The failure of a rank that ended without a report. Args: code: not 0; -n for signal n."""
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
