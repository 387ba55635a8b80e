"""What a job of a sweep leaves to read: how it ended, and its metrics. Imports no torch."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum, unique
from pathlib import Path
from typing import Any

_FOLDER = ".outcomes"  # in the folder of a sweep; nothing else there is touched


@unique
class Status(StrEnum):
    """How a job of a sweep ended."""

    FINISHED = "finished"
    FAILED = "failed"
    SKIPPED = "skipped"  # after a failure, with sweep.on_error=stop


@dataclass(frozen=True)
class Outcome:
    """One job of a sweep; losses and times are NaN where there are none.

    Attributes:
        job: its number. overrides: what sets it apart. degrees: data_parallel, ring, ulysses.
        message: why it failed. loss: mean of the last rows, the objective. step_time_s, tokens_per_s: medians.
        seconds: of the whole job. folder: of its run.
    """

    job: int
    overrides: list[str]
    degrees: dict[str, Any]
    status: Status
    message: str
    exit_code: int
    steps: int
    loss: float
    step_time_s: float
    tokens_per_s: float
    seconds: float
    folder: str

    def write(self, sweep: Path) -> None:
        """Leaves it in the folder of the sweep; whole or not at all."""
        path = sweep / _FOLDER / f"{self.job}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".partial")
        scratch.write_text(json.dumps(asdict(self)), encoding="utf-8")
        scratch.replace(path)


def read_outcomes(sweep: Path) -> list[Outcome]:
    """What the jobs of a sweep left, in their order."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in (sweep / _FOLDER).glob("*.json"))
    outcomes = [Outcome(**{**fields, "status": Status(fields["status"])}) for fields in found]
    return sorted(outcomes, key=lambda outcome: outcome.job)


def forget_outcomes(sweep: Path) -> None:
    """For a new sweep in the folder of an earlier one."""
    for path in (sweep / _FOLDER).glob("*.json"):
        path.unlink()


def differing(outcomes: list[Outcome]) -> list[str]:
    """For each job, the settings that it does not share with all others; of a single job, all."""
    given = [set(outcome.overrides) for outcome in outcomes]
    shared = set.intersection(*given) if len(given) > 1 else set()
    return [" ".join(x for x in outcome.overrides if x not in shared) for outcome in outcomes]


def read_rows(metrics: Path) -> Iterator[dict[str, float]]:
    """Read the rows of a `metrics.csv`; none where there is no file.

    A last line without its end is left out: the process that wrote it was killed, or the disk was full.

    Raises: ValueError: another line is damaged.
    """
    if not metrics.is_file():
        return
    whole, _, _ = metrics.read_bytes().rpartition(b"\n")
    rows = csv.DictReader(whole.decode(errors="replace").splitlines())
    for row in rows:
        try:
            yield {name: float(value) for name, value in row.items()}
        except (TypeError, ValueError) as error:  # too few or too many values, or not a number
            raise ValueError(f"{metrics} is damaged in line {rows.line_num}: {list(row.values())}") from error
