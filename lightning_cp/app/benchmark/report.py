"""Report measurements as a table and CSV. The plots are in `plots.py`."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from rich.table import Table

from lightning_cp.app.benchmark.measure import Figures
from lightning_cp.app.benchmark.subject import HEADS_CALL, ONE_THREAD, QUERIES_CALL, SINGLE_RANK, UNCHECKED, UNMASKED
from lightning_cp.files import writing_new

SPARSE = "sparse"  # the workload with sparse masks
DATA = "data"  # the workload that measures loading and precompute


class _Column(NamedTuple):
    """A column of a table: a key of `ResultRow`, and how its value is written."""

    heading: str
    key: str
    factor: float = 1.0
    how: str = ".2f"
    unit: str = ""
    missing: str = "–"

    def cell(self, row: ResultRow) -> str:
        value = row[self.key]  # type: ignore[literal-required]
        return self.missing if value is None else f"{value * self.factor:{self.how}}{self.unit}"


_MS, _SPREAD = _Column("ms", "best_s", 1e3, ".1f"), _Column("spread", "spread", 100, ".0f", " %")
_LIMIT, _MEDIAN = _Column("× limit", "ratio"), _Column("median", "median_ratio")
_SENT = _Column("MB sent", "sent_bytes", 1e-6, ".1f")
_COLUMNS = (
    *(_MS, _LIMIT, _MEDIAN, _SPREAD),
    _Column("peak MB a rank", "peak_bytes", 1e-6, ".1f"),
    _SENT,
    _Column("exchanges", "exchanges", 1, ".0f"),
    _Column("waiting", "waited", 100, ".0f", " %"),
    _Column("peer check", "check_cost", 100, "+.1f", " %", missing=""),
)
_COLUMNS_OF = {
    SPARSE: (
        *(_Column("area", "work"), _MS, _LIMIT, _MEDIAN, _SPREAD, _SENT),
        _Column("of the ring", "sent_share", 100, ".0f", " %"),
        _Column("imbalance", "imbalance"),
    ),
    DATA: (
        *(_MS, _Column("median", "median_s", 1e3, ".1f"), _SPREAD),
        _Column("samples/s", "samples_per_s"),
        _Column("waiting", "waited", 100, ".1f", " %"),
    ),
}


class ResultRow(TypedDict):
    """One subject's figures, as in `bench.csv`.

    ratio: fastest repetition as a multiple of the limit, which is the fastest repetition of one process on one thread,
        divided by the number of ranks, times `work`.
    median_ratio: the same for the medians.
    spread: interquartile range of the repetitions, divided by the median.
    waited: fraction of a step in which a rank waits; in the workload `data`, the median wait for data, divided by the
        median repetition.
    work: share of the pairs of a query and a key that a sparse mask allows; 1: no mask.
    imbalance: see `Subject`.
    sent_share: bytes sent, as a share of those of a ring without a mask.
    check_cost: fraction of a step that the comparison of arguments between ranks takes: the median over pairs of
        repetitions of the time with it divided by the time without it, minus 1.
    """

    workload: str
    tokens: int
    ranks: int
    subject: str
    best_s: float | None
    median_s: float | None
    ratio: float | None
    median_ratio: float | None
    spread: float | None
    peak_bytes: int
    sent_bytes: int | None
    exchanges: int | None
    waited: float | None
    check_cost: float | None
    work: float
    imbalance: float | None
    sent_share: float | None
    samples_per_s: float | None
    refused: str


def rows_of(workload: str, tokens: int, ranks: int, figures_by_name: dict[str, Figures]) -> list[ResultRow]:
    """Return the rows of one set of measurements."""
    one = figures_by_name.get(ONE_THREAD) or figures_by_name[SINGLE_RANK]
    full_bytes = figures_by_name[UNMASKED].sent_bytes if UNMASKED in figures_by_name else None
    rows = []
    for name, figures in figures_by_name.items():
        times = sorted(figures.times_s)
        parts = (ranks if one.times_s else 1) / figures.work
        row = ResultRow(
            workload=workload,
            tokens=tokens,
            ranks=ranks,
            subject=name,
            best_s=figures.best_s if times else None,
            median_s=figures.median_s if times else None,
            ratio=figures.best_s * parts / one.best_s if times and one.times_s else None,
            median_ratio=figures.median_s * parts / one.median_s if times and one.times_s else None,
            spread=spread_of(times),
            peak_bytes=figures.peak_bytes,
            sent_bytes=figures.sent_bytes,
            exchanges=figures.exchanges,
            waited=figures.waited,
            check_cost=_check_cost(figures, figures_by_name.get(name + UNCHECKED)),
            samples_per_s=None,
            work=figures.work,
            imbalance=figures.imbalance,
            sent_share=figures.sent_bytes / full_bytes if full_bytes and figures.sent_bytes is not None else None,
            refused=figures.refused,
        )
        rows.append(row)
    return rows


def spread_of(times_s: Sequence[float]) -> float | None:
    """Return the interquartile range of the repetitions, divided by the median."""
    times = sorted(times_s)
    return (times[len(times) * 3 // 4] - times[len(times) // 4]) / statistics.median(times) if times else None


def _check_cost(checked: Figures, unchecked: Figures | None) -> float | None:
    """Return the cost of the comparison from pairs of repetitions that ran in turn, so with equal other load."""
    if unchecked is None or not (checked.times_s and unchecked.times_s):
        return None
    return statistics.median(a / b for a, b in zip(checked.times_s, unchecked.times_s, strict=True)) - 1


def write_csv(rows: Sequence[ResultRow], path: Path) -> None:
    """Write all rows as CSV."""
    with writing_new(path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ResultRow.__annotations__))
        writer.writeheader()
        writer.writerows(rows)


def tables(rows: Sequence[ResultRow]) -> list[tuple[str, list[list[str]]]]:
    """Return the title and the cells of one table per set of measurements, with a line for each subject."""
    cells_by_title: dict[str, list[list[str]]] = {}
    for row in rows:
        title = f"{row['workload']}, {row['tokens']:,} tokens, {count_ranks(row['ranks'])}"
        cells_by_title.setdefault(title, []).append(_cells(row))
    return list(cells_by_title.items())


def columns_of(cells: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the headings of a table."""
    columns = next(x for x in (_COLUMNS, *_COLUMNS_OF.values()) if len(x) + 1 == len(cells[0]))
    return ("", *(column.heading for column in columns))


def terminal_table(title: str, cells: Sequence[Sequence[str]]) -> Table:
    """Return a table for rich's console."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns_of(cells)):
        table.add_column(column, justify="right" if index else "left")
    for line in cells:
        table.add_row(*line)
    return table


_ABOUT_CALLS = (
    "",
    "*One call* is what a rank computes in a single attention call without communication: its queries with all",
    "keys, or its heads with all tokens. In *attention*, all ranks compute at the same time, so a value above 1",
    "is the cost of sharing cores, caches and memory.",
)
_ABOUT_ONE_RANK = (
    "",
    "*One_rank* is what the first rank computes while no other rank runs, with simulated transfers. The",
    "difference to the rows *one call* is our overhead.",
)


_ABOUT_DATA = (
    "",
    "*Data* is measured in one process. *Training steps* read batches from a latent cache; *waiting* is the median",
    "time until the next batch is there, as a share of the median step. *Precompute* reads, decodes, crops and",
    "encodes files, and writes the cache; *waiting* is the share of the time in which the VAE waits for files. *ms* is",
    "a step, or a pass over all files or captions. The encoders have random weights and are small: real ones take",
    "longer per sample, and wait less.",
)
_ABOUT_SPARSE = (
    "",
    "*Sparse* is forward and backward of attention with a sparse mask. *Area* is the share of the pairs of a query and",
    "a key that the mask allows. The limit is *area* times the time without a mask, divided by the number of ranks.",
    "*Of the ring* is the number of bytes sent, as a share of those of the ring without a mask. *Imbalance* is the",
    "work of the busiest rank relative to the mean, counted in whole blocks.",
)


def markdown_page(rows: Sequence[ResultRow], *, machine: str, command: str, pictures: Sequence[str]) -> str:
    """Return the page for docs/, in Markdown."""
    lines = [
        "# Benchmarks",
        "",
        f"Made on {machine} by",
        "",
        f"    {command}",
        "",
        "*ms* is the time of the slowest rank in the fastest repetition; repetitions of all rows are interleaved.",
        "*× limit* is this time as a multiple of the limit: the time of one process on one thread (one GPU),",
        "divided by the number of ranks. *Median* is the same multiple for the medians. *Spread* is the",
        "interquartile range of the repetitions, divided by the median; in the plots, times with a spread above 30",
        "% have hollow markers. *Peak* is the largest memory that a step allocates in addition to what was",
        "allocated before. *Waiting* is the fraction of a step in which a rank's thread waits for a transfer,",
        "because communication is not overlapped or because ranks differ in speed (on GPUs: in which only NCCL's",
        "kernels run, in one traced step). *Peer check* is the fraction of a step that the comparison of arguments",
        "between ranks (`check_peers`) takes: the median over pairs of repetitions with and without it.",
        *(_ABOUT_CALLS if any(row["subject"] in (QUERIES_CALL, HEADS_CALL) for row in rows) else ()),
        *(_ABOUT_ONE_RANK if any(row["workload"] == "one_rank" for row in rows) else ()),
        *(_ABOUT_SPARSE if any(row["workload"] == SPARSE for row in rows) else ()),
        *(_ABOUT_DATA if any(row["workload"] == DATA for row in rows) else ()),
        "",
        *(f"![{Path(picture).stem}]({picture})" for picture in pictures),
    ]
    for title, cells in tables(rows):
        columns = columns_of(cells)
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", f"| {' | '.join(columns)} |"]
        lines.append(f"|{'---|' * len(columns)}")
        lines += [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join(lines) + "\n"


def _cells(row: ResultRow) -> list[str]:
    columns = _COLUMNS_OF.get(row["workload"], _COLUMNS)
    if row["refused"]:
        return [row["subject"], row["refused"][:90].replace("|", "/"), *[""] * (len(columns) - 1)]
    return [row["subject"], *(column.cell(row) for column in columns)]


def count_ranks(ranks: int) -> str:
    """Return "1 rank", "2 ranks" and so on."""
    return f"{ranks} rank{'' if ranks == 1 else 's'}"
