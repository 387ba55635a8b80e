"""What is launched, what comes of it, and the one interface in between."""

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
        target: the function, as `package.module:function` or `/path/to/file.py:function`; it is called with the
            configuration on every rank.
        config: a resolved YAML file with that configuration.
        world_size: ranks.
        log_dir: where the output of all ranks but the first goes, and every rank's traceback.
        threads: CPU threads a rank; 0 leaves the choice to the environment.
        environment: variables for the ranks, on top of the launcher's own environment.
        inherited: file descriptors that stay open in the ranks: locks that are held until the last rank has ended.
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
    """How a rank ended."""

    REFUSED = "refused"  # an error that says what the user can do: its message is enough
    RAISED = "raised"  # any other exception: its traceback is needed
    SIGNAL = "signal"
    EXIT = "exit"
    EARLY = "early"  # it ended with exit code 0, and other ranks still needed it
    TIMEOUT = "timeout"  # the launcher's own limit ran out
    STOPPED = "stopped"  # the user, or a signal, stopped the launcher


@dataclass(frozen=True)
class Failure:
    """Why a job failed: the first cause, on the rank that had it."""

    rank: int
    kind: FailureKind
    message: str
    traceback: str = ""
    exit_code: int = 1

    def describe(self) -> str:
        """Give the text for the user: one line, and the traceback of an unexpected exception."""
        if self.kind is FailureKind.RAISED:
            return f"{self.message} (rank {self.rank})\n\n{self.traceback.rstrip()}"
        return self.message

    def to_fields(self) -> dict[str, Any]:
        """Give the failure as a mapping of plain values, cut to a size that is quick to send."""
        return asdict(replace(self, message=self.message[:_MAX_MESSAGE], traceback=self.traceback[-_MAX_TRACEBACK:]))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Failure":
        """Rebuild a failure from `to_fields`. Raises: TypeError, ValueError: `fields` come from elsewhere."""
        return cls(**{**fields, "kind": FailureKind(str(fields.get("kind")))})


@dataclass(frozen=True)
class Result:
    """What came of a job; `began`: whether ranks were started."""

    failure: Failure | None = None
    began: bool = True

    @property
    def was_stopped(self) -> bool:
        """Whether the user, or a signal, ended the job."""
        return self.failure is not None and self.failure.kind is FailureKind.STOPPED

    @property
    def exit_code(self) -> int:
        """For the process that launched it; 0 where all ranks ended well."""
        return 0 if self.failure is None else self.failure.exit_code


class Launcher(Protocol):
    """Runs jobs, one after another. Holds nothing between two jobs, and leaves its own process as it was."""

    def launch(self, job: Job) -> Result:
        """Runs the job to its end. Returns with no rank left running."""
        ...
