"""Report measurements as a table, CSV and plots."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from rich.table import Table

from lightning_cp.app.benchmark.measure import Figures
from lightning_cp.app.benchmark.subject import ALL_THREADS, ALONE, HEADS_CALL, ONE_THREAD, QUERIES_CALL, UNCHECKED

_COLUMNS = ("", "ms", "× limit", "median", "spread", "peak MB a rank", "MB sent", "exchanges", "waiting", "peer check")


class Row(TypedDict):
    """One subject's figures, as in `bench.csv`.

    ratio: the fastest repetition as a multiple of the limit, which is one process's fastest (on one thread) divided by
    the ranks. median_ratio: of the medians. spread: the middle half of the repetitions, as a share of the median.
    check_cost: what comparing arguments between ranks takes, as a share of the step: the median over repetitions of the
    time with it divided by the time without it, less 1.
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
    refused: str


def rows_of(workload: str, tokens: int, ranks: int, found: dict[str, Figures]) -> list[Row]:
    """The rows of one set of measurements."""
    one = found.get(ONE_THREAD) or found[ALONE]
    rows = []
    for name, figures in found.items():
        times = sorted(figures.times_s)
        parts = ranks if one.times_s else 1
        row = Row(
            workload=workload,
            tokens=tokens,
            ranks=ranks,
            subject=name,
            best_s=figures.best_s if times else None,
            median_s=figures.median_s if times else None,
            ratio=figures.best_s * parts / one.best_s if times and one.times_s else None,
            median_ratio=figures.median_s * parts / one.median_s if times and one.times_s else None,
            spread=(times[len(times) * 3 // 4] - times[len(times) // 4]) / figures.median_s if times else None,
            peak_bytes=figures.peak_bytes,
            sent_bytes=figures.sent_bytes,
            exchanges=figures.exchanges,
            waited=figures.waited,
            check_cost=_check_cost(figures, found.get(name + UNCHECKED)),
            refused=figures.refused,
        )
        rows.append(row)
    return rows


def _check_cost(checked: Figures, unchecked: Figures | None) -> float | None:
    """Compare repetitions that ran one after the other, so that other load disturbed both equally."""
    if unchecked is None or not (checked.times_s and unchecked.times_s):
        return None
    return statistics.median(a / b for a, b in zip(checked.times_s, unchecked.times_s, strict=True)) - 1


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(Row.__annotations__))
        writer.writeheader()
        writer.writerows(rows)


def tables(rows: Sequence[Row]) -> list[tuple[str, list[list[str]]]]:
    """For each set of measurements its title and the cells of its table, with a line for each subject."""
    found: dict[str, list[list[str]]] = {}
    for row in rows:
        title = f"{row['workload']}, {row['tokens']:,} tokens, {row['ranks']} ranks"
        found.setdefault(title, []).append(_cells(row))
    return list(found.items())


def terminal_table(title: str, cells: Sequence[Sequence[str]]) -> Table:
    """For rich's console."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for line in cells:
        table.add_row(*line)
    return table


_ABOUT_CALLS = (
    "",
    "*One call* is what a rank computes in a single call, its queries of all keys or its heads of all tokens, with",
    "nothing sent; in *attention* with all ranks at it at once: what is over 1 there is the price of what they share,",
    "cores, caches and memory.",
)
_ABOUT_ONE_RANK = (
    "",
    "*One_rank* is what the first of so many ranks computes while no other runs, with transfers that are pretended:",
    "what is over its single calls is our own.",
)


def markdown_page(rows: Sequence[Row], *, machine: str, command: str, pictures: Sequence[str]) -> str:
    """The page that docs/ keeps."""
    lines = [
        "# Benchmarks",
        "",
        f"Made on {machine} by",
        "",
        f"    {command}",
        "",
        "*ms* is the fastest of interleaved repetitions, of the slowest rank; *× limit* that time as a multiple of one",
        "process's on one thread (one GPU) divided by the ranks; *median* the same of the medians, and *spread* the",
        "middle half of the repetitions as a share of the median. *Peak* is what a step allocates at once beyond what",
        "was there before it. *Waiting* is the share of a step in which a rank's thread waits for a transfer:",
        "communication that nothing hides, differences in speed between ranks included (on GPUs: in which NCCL's",
        "kernels run and no others, of one traced step). *Peer check* is what comparing arguments between ranks",
        "(`check_peers`) takes of a step: the median of repetitions with and without it, done in turn.",
        *(_ABOUT_CALLS if any(row["subject"] in (QUERIES_CALL, HEADS_CALL) for row in rows) else ()),
        *(_ABOUT_ONE_RANK if any(row["workload"] == "one_rank" for row in rows) else ()),
        "",
        *(f"![{Path(picture).stem}]({picture})" for picture in pictures),
    ]
    for title, cells in tables(rows):
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", f"| {' | '.join(_COLUMNS)} |"]
        lines.append(f"|{'---|' * len(_COLUMNS)}")
        lines += [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    if row["refused"]:
        return [row["subject"], row["refused"][:90].replace("|", "/"), *[""] * (len(_COLUMNS) - 2)]
    return [
        row["subject"],
        _told(row["best_s"], 1e3, ".1f"),
        _told(row["ratio"], 1, ".2f"),
        _told(row["median_ratio"], 1, ".2f"),
        _told(row["spread"], 100, ".0f", " %"),
        _told(row["peak_bytes"], 1e-6, ".1f"),
        _told(row["sent_bytes"], 1e-6, ".1f"),
        _told(row["exchanges"], 1, ".0f"),
        _told(row["waited"], 100, ".0f", " %"),
        _told(row["check_cost"], 100, "+.1f", " %") if row["check_cost"] is not None else "",
    ]


def _told(value: float | None, factor: float, how: str, unit: str = "") -> str:
    return "–" if value is None else f"{value * factor:{how}}{unit}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time, memory and waiting of a workload's subjects, for each number of ranks, as PNG.

    By length, or as bars where there is one length.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["ratio"] is not None and row["subject"] != ALL_THREADS]
    shown = [row for row in shown if not row["subject"].endswith(UNCHECKED)]
    degrees = sorted({row["ranks"] for row in shown})
    figure = Figure(figsize=(14, 3.4 * len(degrees)), layout="constrained")
    grid: Any = figure.subplots(len(degrees), 3, squeeze=False)
    for axes, ranks in zip(grid, degrees, strict=True):
        here = sorted((row for row in shown if row["ranks"] == ranks), key=lambda row: row["tokens"])
        lengths = list(dict.fromkeys(row["tokens"] for row in here))
        curves = _curves(here, ranks)
        if len(lengths) == 1:
            _draw_bars(axes, curves)
        else:
            _draw_lines(axes, curves, lengths)
        names = ("time, × limit", "peak memory a rank, × one process / ranks", "waiting, % of the step")
        for axis, name in zip(axes, names, strict=True):
            axis.set_title(f"{ranks} ranks: {name}", fontsize=9)
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)
    figure.savefig(path, dpi=110)


_Curves = dict[str, tuple[list[float | None], ...]]  # of each subject: times, memory, waiting, by length


def _curves(rows: Sequence[Row], ranks: int) -> _Curves:
    one = {row["tokens"]: row for row in rows if row["subject"] in (ONE_THREAD, ALONE)}
    found: _Curves = {}
    for subject in dict.fromkeys(row["subject"] for row in rows):
        if subject in (ONE_THREAD, ALONE):
            continue
        mine = {row["tokens"]: row for row in rows if row["subject"] == subject}
        measured = [mine.get(tokens) for tokens in one]
        found[subject] = (
            [row and row["ratio"] for row in measured],
            [row and row["peak_bytes"] * ranks / max(one[row["tokens"]]["peak_bytes"], 1) for row in measured],
            [None if row is None or row["waited"] is None else 100 * row["waited"] for row in measured],
        )
    return found


def _draw_lines(axes: Any, curves: _Curves, lengths: Sequence[int]) -> None:
    for index, (subject, of_subject) in enumerate(curves.items()):
        style = {"marker": "o", "linestyle": _line_of(subject), "color": f"C{index % 10}"}
        for axis, values in zip(axes, of_subject, strict=True):
            if any(x is not None for x in values):
                axis.plot(lengths, values, label=subject, **style)
    for axis in axes:
        axis.set(xlabel="tokens", xscale="log")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
    axes[0].axhline(1, color="black", linewidth=0.8)
    axes[2].set_ylim(0, max(5, axes[2].get_ylim()[1]))  # that a thousandth does not look like much
    handles, labels = axes[0].get_legend_handles_labels()
    if labels:
        axes[2].legend(handles, labels, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))


def _draw_bars(axes: Any, curves: _Curves) -> None:
    for panel, axis in enumerate(axes):
        values = [of_subject[panel][0] for of_subject in curves.values()]
        bars = axis.barh(range(len(values)), [0 if x is None else x for x in values], color="tab:blue")
        axis.bar_label(
            bars, ["–" if x is None else f"{x:.1f}" if panel == 2 else f"{x:.2f}" for x in values], padding=3
        )
        axis.set_yticks(range(len(values)), list(curves) if panel == 0 else [""] * len(values))
        axis.invert_yaxis()
        axis.margins(x=0.12)
    axes[0].axvline(1, color="black", linewidth=0.8)


def _line_of(subject: str) -> str:
    if subject in (QUERIES_CALL, HEADS_CALL):
        return "--"
    return ":" if subject.startswith(("diffusers", "gathered", "yun")) else "-"


def machine_name() -> str:
    """CPU and cores, or the GPUs."""
    import os
    import platform

    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    info = Path("/proc/cpuinfo")
    named = [x for x in info.read_text().splitlines() if x.startswith("model name")] if info.is_file() else []
    name = named[0].split(":", 1)[1].strip() if named else platform.processor()
    return f"{os.cpu_count()} cores of {name}, torch {torch.__version__}"
