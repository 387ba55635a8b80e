"""Rows of measurements, and what is made of them: tables in the terminal, bench.csv and a Markdown page."""

from __future__ import annotations

import csv
import shlex
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from rich.table import Table

from lightning_cp.files import writing_new
from lightning_cp.recipes.benchmarks.measure import Figures
from lightning_cp.recipes.benchmarks.subject import ONE_THREAD, SINGLE_RANK
from lightning_cp.recipes.planning.timing import machine_name
from lightning_cp.recipes.terminal import console

# One subject's figures, as in bench.csv. A figure that was not measured is left out.
Row = dict[str, Any]


class Column(NamedTuple):
    """A column of a table: a key of a row, and how its value is written."""

    heading: str
    key: str
    factor: float = 1.0
    how: str = ".2f"
    unit: str = ""
    missing: str = "–"

    def cell(self, row: Row) -> str:
        """Return the value of a row as text."""
        return f"{row[self.key] * self.factor:{self.how}}{self.unit}" if self.key in row else self.missing


MS, SPREAD = Column("ms", "best_s", 1e3, ".1f"), Column("spread", "spread", 100, ".0f", " %")
LIMIT, MEDIAN = Column("× limit", "ratio"), Column("median", "median_ratio")
SENT = Column("MB sent", "sent_bytes", 1e-6, ".1f")


def rows_of(workload: str, tokens: int, ranks: int, figures_by_name: dict[str, Figures]) -> list[Row]:
    """Return the rows of one set of measurements.

    ratio: fastest repetition as a multiple of the limit, which is the fastest repetition of one process on one thread,
        divided by the number of ranks, times the share of its work.
    median_ratio: the same for the medians.
    waited: fraction of a step in which a rank waits.
    """
    one = figures_by_name.get(ONE_THREAD) or figures_by_name[SINGLE_RANK]
    rows = []
    for name, figures in figures_by_name.items():
        row = {"workload": workload, "tokens": tokens, "ranks": ranks, "subject": name}
        if figures.refused:
            rows.append({**row, "refused": figures.refused})
            continue
        row |= {**times_of(figures.times_s), "peak_bytes": figures.peak_bytes}
        if one.times_s:
            parts = ranks / figures.work
            row |= {
                "ratio": figures.best_s * parts / one.best_s,
                "median_ratio": figures.median_s * parts / one.median_s,
            }
        if figures.exchanges is not None:
            row |= {"sent_bytes": figures.sent_bytes, "exchanges": figures.exchanges, "waited": figures.waited}
        rows.append(row)
    return rows


def times_of(times_s: Sequence[float]) -> Row:
    """Return the fastest repetition, the median, and the interquartile range divided by the median."""
    times, median = sorted(times_s), statistics.median(times_s)
    spread = (times[len(times) * 3 // 4] - times[len(times) // 4]) / median
    return {"best_s": times[0], "median_s": median, "spread": spread}


def cells_of(rows: Iterable[Row], columns: Sequence[Column]) -> list[list[str]]:
    """Return the cells of a table, with a line for each subject."""
    refused = {row["subject"]: row["refused"][:90].replace("|", "/") for row in rows if "refused" in row}
    empty = [""] * (len(columns) - 1)
    return [
        [row["subject"], *([refused[row["subject"]], *empty] if "refused" in row else (c.cell(row) for c in columns))]
        for row in rows
    ]


def show(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Print a table for each set of measurements."""
    for title, of_set in _sets(rows).items():
        table = Table(title=title, title_justify="left")
        for heading in ("", *(column.heading for column in columns)):
            table.add_column(heading, justify="right" if heading else "left")
        for line in cells_of(of_set, columns):
            table.add_row(*line)
        console(width=140).print(table)


def _sets(rows: Iterable[Row]) -> dict[str, list[Row]]:
    sets: dict[str, list[Row]] = {}
    for row in rows:
        title = f"{row['workload']}, {row['tokens']:,} tokens, {count_ranks(row['ranks'])}"
        sets.setdefault(title, []).append(row)
    return sets


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write all rows as CSV. Figures that no row has are no column."""
    with writing_new(path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def publish(
    rows: Sequence[Row],
    columns: Sequence[Column],
    folder: Path,
    page: str | None,
    *,
    about: str,
    pictures: Sequence[Path] = (),
) -> None:
    """Write bench.csv to the run folder, and a Markdown page with its pictures. Args: page: its path; None: no page."""
    write_csv(rows, folder / "bench.csv")
    print(", ".join([str(folder / "bench.csv"), *(path.name for path in pictures)]))
    if page is None:
        return
    target = Path(page)
    target.parent.mkdir(parents=True, exist_ok=True)
    names = [path.name.replace("bench", target.stem, 1) for path in pictures]
    for path, name in zip(pictures, names, strict=True):
        with writing_new(target.with_name(name)) as copy:
            copy.write_bytes(path.read_bytes())
    overrides = [x for x in HydraConfig.get().overrides.task if not x.startswith("page=")]
    command = shlex.join(["lightning-cp", "bench", *overrides])
    with writing_new(target):
        target.write_text(markdown_page(rows, columns, about=about, command=command, pictures=names), "utf-8")


def markdown_page(
    rows: Sequence[Row], columns: Sequence[Column], *, about: str, command: str, pictures: Sequence[str]
) -> str:
    """Return the page for docs/, in Markdown."""
    lines = ["# Benchmarks", "", f"Made on {machine_name()} by", "", f"    {command}", "", about.strip(), ""]
    lines += [f"![{Path(picture).stem}]({picture})" for picture in pictures]
    for title, of_set in _sets(rows).items():
        headings = " | ".join(["", *(column.heading for column in columns)])
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", f"| {headings} |", f"|{'---|' * (len(columns) + 1)}"]
        lines += [f"| {' | '.join(line)} |" for line in cells_of(of_set, columns)]
    return "\n".join(lines) + "\n"


def count_ranks(ranks: int) -> str:
    """Return "1 rank", "2 ranks" and so on."""
    return f"{ranks} rank{'' if ranks == 1 else 's'}"
