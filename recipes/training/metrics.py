"""Read the metrics.csv of a run, and scale the plots of it. Imports no torch."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OPTIONAL_COLUMNS = ("val_loss", "sigma", "peak_memory_gib", "expert")  # empty in the rows of steps without a value


def read_metric_rows(metrics: Path) -> Iterator[dict[str, float]]:
    """Read the rows of a `metrics.csv`; no rows if there is no file.

    An incomplete last line is skipped: the process that wrote it was killed, or the disk was full.

    Raises: ValueError: another line is damaged.
    """
    if not metrics.is_file():
        return
    complete_lines, _, _ = metrics.read_bytes().rpartition(b"\n")
    rows = csv.DictReader(complete_lines.decode(errors="replace").splitlines())
    for row in rows:
        try:
            yield {
                name: math.nan if name in OPTIONAL_COLUMNS and value == "" else float(value)
                for name, value in row.items()
            }
        except (TypeError, ValueError) as error:  # too few or too many values, or not a number
            raise ValueError(f"{metrics} is damaged in line {rows.line_num}: {list(row.values())}") from error


def show_whole(axes: Any) -> None:
    """Let the y axis reach 5 % beyond the finite values, so that curves fill the plot and none is cut off."""
    lowest, highest = axes.dataLim.y0, axes.dataLim.y1
    if math.isfinite(lowest) and math.isfinite(highest) and highest > lowest:
        margin = 0.05 * (highest - lowest)
        axes.set_ylim(lowest - margin, highest + margin)
