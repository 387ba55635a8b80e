"""Figures and rows of the workload `data`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from lightning_cp.app.benchmark.report import DATA, ResultRow, spread_of


@dataclass
class DataFigures:
    """Measurements of one subject.

    Attributes:
        samples: samples or captions of each repetition.
        times_s: seconds of each repetition.
        waited_s: seconds of each repetition spent waiting for data; empty if the subject reads no data.
        refused: why the subject cannot run; "" if it can.
    """

    samples: int = 0
    times_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    refused: str = ""

    @property
    def waiting(self) -> float | None:
        """Median waiting time divided by the median time of a repetition."""
        if not self.waited_s:
            return None
        return statistics.median(self.waited_s) / statistics.median(self.times_s)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second, at the median."""
        return self.samples / statistics.median(self.times_s) if self.times_s else None


def data_rows(tokens: int, figures_by_name: dict[str, DataFigures]) -> list[ResultRow]:
    """Return the rows of the workload `data`, which has no limit to compare with. Args: tokens: tokens per sample."""
    return [
        ResultRow(
            workload=DATA,
            tokens=tokens,
            ranks=1,
            subject=name,
            best_s=min(figures.times_s, default=None),
            median_s=statistics.median(figures.times_s) if figures.times_s else None,
            ratio=None,
            median_ratio=None,
            spread=spread_of(figures.times_s),
            peak_bytes=0,
            sent_bytes=None,
            exchanges=None,
            waited=figures.waiting,
            check_cost=None,
            samples_per_s=figures.samples_per_s,
            work=1.0,
            imbalance=None,
            sent_share=None,
            refused=figures.refused,
        )
        for name, figures in figures_by_name.items()
    ]
