"""Store and read the outcome of each job of a sweep: status and metrics. Imports no torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum, unique
from pathlib import Path
from typing import Any

from lightning_cp.files import PRIVATE, writing_new

_FOLDER = ".outcomes"  # subfolder of the sweep's folder; no other file there is changed


@unique
class Status(StrEnum):
    """The final status of a sweep's job."""

    FINISHED = "finished"
    FAILED = "failed"
    SKIPPED = "skipped"  # after a failure, with sweep.on_error=stop


@dataclass(frozen=True)
class Outcome:
    """The outcome of one job of a sweep; missing losses and times are NaN.

    Attributes:
        job: job number. overrides: Hydra overrides of the job. degrees: data_parallel, ring, ulysses.
        message: error message of a failed job. loss: mean loss of the last rows.
        val_loss: lowest validation loss; NaN without validation. It is then the objective, otherwise `loss` is.
        step_time_s, tokens_per_s: medians of a training. call_s: fastest call of a pipeline, when sampling.
        seconds: duration of the whole job. folder: run folder.
    """

    job: int
    overrides: list[str]
    degrees: dict[str, Any]
    status: Status
    message: str
    exit_code: int
    steps: int
    loss: float
    val_loss: float
    step_time_s: float
    tokens_per_s: float
    call_s: float
    seconds: float
    folder: str

    @property
    def objective(self) -> float:
        """The value that a sweeper minimises."""
        return self.loss if math.isnan(self.val_loss) else self.val_loss

    def write(self, sweep: Path) -> None:
        """Write the outcome into the sweep's folder atomically."""
        path = sweep / _FOLDER / f"{self.job}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".partial")
        with writing_new(scratch, mode=PRIVATE):
            scratch.write_text(json.dumps(asdict(self)), encoding="utf-8")
            scratch.replace(path)


def read_outcomes(sweep: Path) -> list[Outcome]:
    """Read the outcomes of a sweep's jobs, sorted by job number."""
    entries = (json.loads(path.read_text(encoding="utf-8")) for path in (sweep / _FOLDER).glob("*.json"))
    outcomes = [Outcome(**{**fields, "status": Status(fields["status"])}) for fields in entries]
    return sorted(outcomes, key=lambda outcome: outcome.job)


def delete_outcomes(sweep: Path) -> None:
    """Delete the outcomes of an earlier sweep in the same folder."""
    for path in (sweep / _FOLDER).glob("*.json"):
        path.unlink()


def differing(outcomes: list[Outcome]) -> list[str]:
    """Return for each job the overrides that not all jobs share; for a single job, all its overrides."""
    overrides = [set(outcome.overrides) for outcome in outcomes]
    shared = set.intersection(*overrides) if len(overrides) > 1 else set()
    return [" ".join(x for x in outcome.overrides if x not in shared) for outcome in outcomes]
