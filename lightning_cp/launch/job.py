"""Define a job, its result, and the launcher interface."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum, unique
from pathlib import Path
from typing import Any, Protocol

_MAX_MESSAGE, _MAX_TRACEBACK = 10_000, 100_000  # characters


@dataclass(frozen=True)
class Job:
    """One run of a function on all ranks.

    Args:
        target: the function, as `package.module:function` or `/path/to/file.py:function`; it is called on every
            rank with `config`.
        config: path of the file with the target's settings.
        world_size: number of ranks.
        log_dir: folder for the output of all ranks but the first, and for every rank's traceback.
        threads: CPU threads per rank; 0 leaves the choice to the environment.
        environment: environment variables of the ranks, added to the launcher's environment.
        inherited: file descriptors that stay open in the ranks, such as locks to hold until the last rank has ended.
    """

    target: str
    config: Path
    world_size: int
    log_dir: Path
    threads: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    inherited: tuple[int, ...] = ()


@unique
class FailureKind(StrEnum):
    """The kind of failure."""

    REFUSED = "refused"  # an error with a clear message for the user; no traceback is printed
    RAISED = "raised"  # any other exception; its traceback is printed
    SIGNAL = "signal"
    EXIT = "exit"
    EARLY = "early"  # the rank exited with code 0 while other ranks still needed it
    LOST = "lost"  # the connection to another rank broke, and that rank's failure is not known here
    TIMEOUT = "timeout"  # the launcher's time limit was exceeded
    STOPPED = "stopped"  # the user or a signal stopped the job


@dataclass(frozen=True)
class Failure:
    """The first cause of a job's failure and the rank where it occurred.

    Attributes:
        traceback: traceback of the exception that the rank reported.
        log_end: last lines of the log of a rank that ended without a report; empty for rank 0, which has no log.
    """

    rank: int
    kind: FailureKind
    message: str
    traceback: str = ""
    exit_code: int = 1
    log_end: str = ""

    def describe(self) -> str:
        """Return the text for the user: the message, plus the traceback of an unexpected exception or the log's end."""
        if self.kind is FailureKind.RAISED:
            return f"{self.message} (rank {self.rank})\n\n{self.traceback.rstrip()}"
        if self.log_end:
            return f"{self.message}. The last lines of its log:\n\n{self.log_end.rstrip()}"
        return self.message

    def to_fields(self) -> dict[str, Any]:
        """Return the failure as a mapping of plain values, with message and traceback truncated for sending."""
        return asdict(replace(self, message=self.message[:_MAX_MESSAGE], traceback=self.traceback[-_MAX_TRACEBACK:]))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Failure":
        """Rebuild a failure from `to_fields`."""
        return cls(**{**fields, "kind": FailureKind(fields["kind"])})


@dataclass(frozen=True)
class Result:
    """The result of a job: its failure (None on success); `began` is True if ranks were started."""

    failure: Failure | None = None
    began: bool = True

    @property
    def was_stopped(self) -> bool:
        """True if the user or a signal stopped the job."""
        return self.failure is not None and self.failure.kind is FailureKind.STOPPED

    @property
    def exit_code(self) -> int:
        """Exit code for the launching process; 0 if all ranks succeeded."""
        return 0 if self.failure is None else self.failure.exit_code


class Launcher(Protocol):
    """Run jobs one after another, without keeping state between jobs or changing the launching process."""

    def launch(self, job: Job) -> Result:
        """Run the job to its end. No rank is running when it returns."""
