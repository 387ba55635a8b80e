"""Plot the measurements of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_cp.files import writing_new
from lightning_cp.recipes.benchmarks.report import Row, count_ranks
from lightning_cp.recipes.benchmarks.subject import (
    ALL_THREADS,
    HEADS_CALL,
    ONE_THREAD,
    QUERIES_CALL,
    SINGLE_RANK,
    UNCHECKED,
)


def draw_workload(rows: Sequence[Row], path: Path) -> None:
    """Plot time, memory and waiting of a workload's subjects, for each number of ranks, as PNG.

    By length, or as bars if there is only one length. Times with a spread above 30 % are marked.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if "ratio" in row and row["subject"] != ALL_THREADS]
    shown = [row for row in shown if not row["subject"].endswith(UNCHECKED)]
    degrees = sorted({row["ranks"] for row in shown})
    figure = Figure(figsize=(14, 3.4 * len(degrees)), layout="constrained")
    grid: Any = figure.subplots(len(degrees), 3, squeeze=False)
    palette = colours(row["subject"] for row in shown)
    for axes, ranks in zip(grid, degrees, strict=True):
        here = sorted((row for row in shown if row["ranks"] == ranks), key=lambda row: row["tokens"])
        lengths = list(dict.fromkeys(row["tokens"] for row in here))
        curves = _curves(here, ranks)
        noisy = _draw_bars(axes, curves, palette) if len(lengths) == 1 else _draw_lines(axes, curves, lengths, palette)
        names = ("time, × limit", "peak memory a rank, × one process / ranks", "waiting, % of the step")
        for axis, name in zip(axes, names, strict=True):
            axis.set_title(f"{count_ranks(ranks)}: {name}{noisy if axis is axes[0] else ''}", fontsize=9)
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)
    with writing_new(path):
        figure.savefig(path, dpi=110)


_NOISY = 0.3  # spread above which a time is marked
_Curves = dict[str, tuple[list[float | None], ...]]  # subject -> (times, memory, waiting, spread), each by length


def _curves(rows: Sequence[Row], ranks: int) -> _Curves:
    one = {row["tokens"]: row for row in rows if row["subject"] in (ONE_THREAD, SINGLE_RANK)}
    curves: _Curves = {}
    for subject in dict.fromkeys(row["subject"] for row in rows):
        if subject in (ONE_THREAD, SINGLE_RANK):
            continue
        mine = {row["tokens"]: row for row in rows if row["subject"] == subject}
        measured = [mine.get(tokens, {}) for tokens in one]
        curves[subject] = (
            [row.get("ratio") for row in measured],
            [x["peak_bytes"] * ranks / max(one[x["tokens"]]["peak_bytes"], 1) if x else None for x in measured],
            [100 * row["waited"] if "waited" in row else None for row in measured],
            [row.get("spread") for row in measured],
        )
    return curves


def _draw_lines(axes: Any, curves: _Curves, lengths: Sequence[int], palette: Mapping[str, Any]) -> str:
    """Plot one curve per subject. Returns: text for the title if some times have a large spread."""
    noisy = ""
    for subject, (*panels, spreads) in curves.items():
        style = {"linestyle": _line_of(subject), "color": palette[subject], "clip_on": False, "zorder": 3}
        for axis, values in zip(axes, panels, strict=True):
            if any(x is not None for x in values):
                axis.plot(lengths, values, label=subject, marker="o", **style)
        for length, value, spread in zip(lengths, panels[0], spreads, strict=True):
            if value is not None and spread is not None and spread > _NOISY:
                hollow = {"marker": "o", "markerfacecolor": "white", "zorder": 4}
                axes[0].plot([length], [value], **{**style, **hollow})
                noisy = " (hollow: spread above 30 %)"
    for axis in axes:
        axis.set(xlabel="tokens", xscale="log")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
    axes[0].axhline(1, color="black", linewidth=0.8)
    axes[2].set_ylim(0, max(5, axes[2].get_ylim()[1]))  # a waiting time of 0.1 % must not fill the plot
    handles, labels = axes[0].get_legend_handles_labels()
    if labels:
        axes[2].legend(handles, labels, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return noisy


def _draw_bars(axes: Any, curves: _Curves, palette: Mapping[str, Any]) -> str:
    """Draw one bar per subject. Returns: text for the title; empty, because noisy bars have the spread at their end."""
    for panel, axis in enumerate(axes):
        values = [of_subject[panel][0] for of_subject in curves.values()]
        widths = [0 if x is None else x for x in values]
        bars = axis.barh(range(len(values)), widths, color=[palette[subject] for subject in curves])
        labels = ["–" if x is None else f"{x:.1f}" if panel == 2 else f"{x:.2f}" for x in values]
        if panel == 0:
            spreads = [of_subject[3][0] for of_subject in curves.values()]
            noise = [f" (spread {100 * x:.0f} %)" if x is not None and x > _NOISY else "" for x in spreads]
            labels = [f"{label}{note}" for label, note in zip(labels, noise, strict=True)]
        axis.bar_label(bars, labels, padding=3)
        axis.set_yticks(range(len(values)), list(curves) if panel == 0 else [""] * len(values))
        axis.invert_yaxis()
        axis.margins(x=0.3 if panel == 0 else 0.12)
    axes[0].axvline(1, color="black", linewidth=0.8)
    return ""


def _line_of(subject: str) -> str:
    if subject in (QUERIES_CALL, HEADS_CALL):
        return "--"
    return ":" if subject.startswith(("diffusers", "gathered")) else "-"


def colours(names: Iterable[str]) -> dict[str, Any]:
    """Return a different colour for each name (up to 20 names)."""
    from matplotlib import colormaps

    palette: Any = colormaps["tab20"]
    strong_first = [*range(0, 20, 2), *range(1, 20, 2)]
    return {name: palette(strong_first[i % 20]) for i, name in enumerate(dict.fromkeys(names))}
