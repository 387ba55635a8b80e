"""What the measurements of one GPU report: checks against a goal, and rows of tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from lightning_cp.checkpoint.folder import atomic_file

CUT_OFF = "cut off"  # the error of a measurement while it runs


class Check(NamedTuple):
    """A measured value and its goal.

    Attributes:
        name: name of the measured quantity.
        value: the measured value with its unit.
        goal: the bound, as text; "" if there is none on this device.
        passed: None if there is no goal.
    """

    name: str
    value: str
    goal: str = ""
    passed: bool | None = None


@dataclass
class Result:
    """What one measurement or test reports.

    Attributes:
        rows: rows of tables: the title of the table, its columns, the cells.
        values: numbers that a later measurement of the stage reads; at first, those of the earlier ones.
        error: why it failed; "" if it did not. It runs again in the next run.
        seconds: wall-clock time.
        settings: digest of what the result depends on; with other settings it is measured again.
    """

    checks: list[Check] = field(default_factory=list)
    rows: list[tuple[str, list[str], list[str]]] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    settings: str = ""

    def add_row(self, title: str, columns: list[str], cells: list[str]) -> None:
        """Add a row to the table `title`."""
        self.rows.append((title, columns, cells))

    def add_check(self, name: str, value: float, goal: float | None, text: str = "{:.2f}") -> None:
        """Add a check of a number. Args: goal: the largest value that meets it, if there is one."""
        passed = None if goal is None else value <= goal
        self.checks.append(Check(name, text.format(value), "" if goal is None else f"≤ {goal:g}", passed))


Results = dict[str, dict[str, Result]]  # by stage, then by measurement
# A name, and a function that measures and adds to the result.
Measurement = tuple[str, Callable[[Result], None]]


def read_results(path: Path) -> Results:
    """Read the results of an earlier run; empty if there is no file."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {
        stage: {name: Result(**{**x, "checks": [Check(*c) for c in x["checks"]]}) for name, x in items.items()}
        for stage, items in stored.items()
    }


def write_results(results: Results, path: Path) -> None:
    """Replace the file with `results`."""
    stored = {stage: {name: asdict(x) for name, x in items.items()} for stage, items in results.items()}
    with atomic_file(path) as scratch:
        scratch.write_text(json.dumps(stored, indent=1), encoding="utf-8")
