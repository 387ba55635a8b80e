"""Results of one stage: checks against a goal, tables, and which measurements are done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_cp.files import writing_new

CUT_OFF = "cut off"  # the error of a stage while it runs


@dataclass(frozen=True)
class Check:
    """One measured value and the goal it must meet.

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


@dataclass(frozen=True)
class ResultTable:
    """A table of the page: a title, the column names, and the cells row by row."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass
class StageResult:
    """Everything that one stage reports.

    Attributes:
        settings: settings of the run; with other settings the stage runs again.
        seconds: wall-clock time, of all runs of the stage.
        error: reason why the stage did not finish; "" if it did.
        rows: rows of `bench.csv`, for the plots.
        values: numbers that a later measurement of the stage reads.
        finished: names of the measurements that are done. An interrupted stage continues after them.
        failed: error by measurement that ended the process. These run again in the next run, not in this one.
        started: current measurement; "" if there is none.
    """

    settings: dict[str, Any]
    seconds: float = 0.0
    error: str = ""
    checks: list[Check] = field(default_factory=list)
    tables: list[ResultTable] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    started: str = ""

    def add_row(self, title: str, columns: list[str], row: list[str]) -> None:
        """Append a row to the table `title`, which the first row creates."""
        table = next((table for table in self.tables if table.title == title), None)
        if table is None:
            table = ResultTable(title, columns, [])
            self.tables.append(table)
        table.rows.append(row)


# A name, and a function that measures and adds to the stage's result.
Measurement = tuple[str, Callable[[StageResult], None]]


def run_measurements(measurements: Iterable[Measurement], result: StageResult, save: Callable[[], None]) -> None:
    """Run the measurements that have neither finished nor failed, and save after each.

    Args: save: function that writes `result`; it is called before and after each measurement.
    """
    for name, measure in measurements:
        if name in result.finished or name in result.failed:
            continue
        result.started = name
        save()
        measure(result)
        result.finished.append(name)
        result.started = ""
        save()


def read_results(path: Path) -> dict[str, StageResult]:
    """Read the results of an earlier run, by stage; empty if there is no file.

    Raises: ValueError: the file is not one that `write_results` wrote.
    """
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: StageResult(
                **{
                    **fields,
                    "checks": [Check(**check) for check in fields["checks"]],
                    "tables": [ResultTable(**table) for table in fields["tables"]],
                }
            )
            for name, fields in stored.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a results file of this benchmark: {error}. Remove it, or use another folder"
        ) from error


def write_results(results: dict[str, StageResult], path: Path) -> None:
    """Replace the file with `results`."""
    partial = path.with_name(f"{path.name}.partial")
    with writing_new(partial):
        partial.write_text(json.dumps({name: asdict(fields) for name, fields in results.items()}, indent=1), "utf-8")
        partial.replace(path)
