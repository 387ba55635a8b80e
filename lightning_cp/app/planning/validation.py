"""Compare predicted times with measured ones on this machine: bench=planning."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.benchmark.measure import low_quartile
from lightning_cp.app.benchmark.report import machine_name
from lightning_cp.app.planning.ranks import Case, run_on_ranks
from lightning_cp.app.planning.settings import request_of
from lightning_cp.app.runs.command import conf_dir
from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.launch import Failure
from lightning_cp.planning.devices import Device, as_figures, device_named
from lightning_cp.planning.layouts import described
from lightning_cp.planning.request import Choice
from lightning_cp.planning.search import predicted, ranked
from lightning_cp.planning.step import Layout

GOAL = 0.2  # median error of predicted times


@dataclass(frozen=True)
class Row:
    """A configuration. Attributes: choice: the prediction, with the measured seconds."""

    model: str
    task: str
    choice: Choice

    @property
    def measured_s(self) -> float:
        """Measured seconds of a step."""
        assert self.choice.measured_s is not None, "every row is measured"
        return self.choice.measured_s

    @property
    def error(self) -> float:
        """Predicted relative to measured seconds, minus 1."""
        return self.choice.times.seconds / self.measured_s - 1

    @property
    def group(self) -> tuple[str, str, int]:
        """Model, task and number of ranks: what a layout is chosen for."""
        return self.model, self.task, self.choice.layout.ranks


@dataclass(frozen=True)
class Validation:
    """The result. Attributes: devices: measured rates for each number of ranks. loads: load averages of the machine."""

    rows: Sequence[Row]
    devices: Sequence[Device]
    loads: Sequence[float]

    @property
    def median_error(self) -> float:
        """Median of the absolute errors."""
        return statistics.median(abs(row.error) for row in self.rows)

    def costs(self) -> dict[tuple[str, str, int], tuple[Row, float]]:
        """Return the first choice of each group with several layouts, and its time relative to the fastest measured."""
        costs = {}
        for group in dict.fromkeys(row.group for row in self.rows):
            rows = [row for row in self.rows if row.group == group]
            if len(rows) > 1:
                best = ranked(row.choice for row in rows)[0][0]
                first = next(row for row in rows if row.choice is best)
                fastest = min(row.choice.measured_sample_s for row in rows)
                costs[group] = first, first.choice.measured_sample_s / fastest
        return costs


def check_validation(config: DictConfig) -> str:
    """Check the settings of bench=planning. Returns: what is wrong; "" if nothing is."""
    if config.device != "cpu":
        return f"device={config.device}: bench=planning measures CPU ranks, use device=cpu"
    known = sorted({ranks for by_ranks in config.validation.layouts.values() for ranks in by_ranks})
    if not config.ranks or not set(config.ranks) <= set(known):
        return f"ranks={list(config.ranks)} must be some of {known}, those with layouts in bench=planning"
    if not isinstance(config.repeats, int) or config.repeats < 1:
        return f"repeats={config.repeats} must be an integer of at least 1"
    return ""


def cases_of(config: DictConfig, ranks: int) -> Iterator[tuple[str, str, Case]]:
    """Yield name and task of each case of this number of ranks, and the case."""
    folder = Path(conf_dir("plan"))
    defaults = OmegaConf.merge(OmegaConf.load(folder / "models.yaml"), OmegaConf.load(folder / "plan.yaml"))
    for name, model in config.validation.models.items():
        for task, by_ranks in config.validation.layouts.items():
            layouts = [Layout(**fields) for fields in by_ranks.get(ranks, [])]
            settings: Any = OmegaConf.merge(defaults, model, {"task": task, "ranks": ranks, "gpu": "cpu"})
            if layouts:
                yield str(name), str(task), Case(settings, layouts)


def validate(config: DictConfig, folder: Path, report: Callable[[str], object] = print) -> Validation | Failure:
    """Measure and predict all configurations. Returns: the result; the failure of a rank, if one failed."""
    rows, devices, loads = [], [], [os.getloadavg()[0]]
    for ranks in config.ranks:
        cases = list(cases_of(config, ranks))
        report(f"ranks={ranks}: {sum(len(case.layouts) for *_, case in cases)} configurations")
        found = run_on_ranks(
            [case for *_, case in cases],
            ranks,
            folder / "logs" / f"ranks_{ranks}",
            kind=config.device,
            repeats=config.repeats,
            limit_s=config.limit_s,
            calibrates=True,
        )
        if isinstance(found, Failure):
            return found
        figures = {**(found.device or {})}
        devices.append(device_named(figures.pop("name"), figures))
        loads.append(os.getloadavg()[0])
        for (name, task, case), seconds in zip(cases, found.seconds, strict=True):
            request = replace(request_of(case.settings), device=devices[-1])
            for layout, times in zip(case.layouts, seconds, strict=True):
                choice = replace(predicted(request, layout), measured_s=low_quartile(times))
                rows.append(Row(name, task, choice))
    return Validation(rows, devices, loads)


def summary(result: Validation) -> list[str]:
    """Return the errors and the costs of the first choices, in two sentences."""
    costs = [cost for _, cost in result.costs().values()]
    within = sum(abs(row.error) <= GOAL for row in result.rows)
    lines = [
        f"{len(result.rows)} configurations: median error {result.median_error:.0%} (goal: at most {GOAL:.0%}), "
        f"{within} within {GOAL:.0%}, largest {max(abs(row.error) for row in result.rows):.0%}."
    ]
    if costs:
        lines.append(
            f"First choice over the fastest measured layout, {len(costs)} groups: median "
            f"{statistics.median(costs):.2f}, worst {max(costs):.2f}."
        )
    return lines


def markdown(result: Validation) -> str:
    """Return the page with all rows."""
    loads = ", ".join(f"{load:.1f}" for load in result.loads)
    lines = [
        "# Predicted and measured times",
        "",
        f"`lightning-cp bench bench=planning` on {machine_name()}; load averages before each number of ranks and "
        f"at the end: {loads}.",
        "",
        *summary(result),
        "",
        "| model | task | ranks | layout | predicted, ms | measured, ms | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result.rows:
        layout, times = row.choice.layout, row.choice.times
        rotated = ", rotated" if layout.rotate_method == "alltoall" else ""
        lines.append(
            f"| {row.model} | {row.task} | {layout.ranks} | {described(layout)}{rotated} | {1e3 * times.seconds:.0f} | "
            f"{1e3 * row.measured_s:.0f} | {row.error:+.0%} |"
        )
    lines += ["", "| model | task | ranks | first choice | over the fastest |", "|---|---|---|---|---|"]
    for (model, task, ranks), (first, cost) in result.costs().items():
        lines.append(f"| {model} | {task} | {ranks} | {described(first.choice.layout)} | {cost:.2f} |")
    return "\n".join(lines) + "\n"


def write(result: Validation, folder: Path) -> list[Path]:
    """Write planning.md and planning.json. Returns: their paths."""
    page, data = folder / "planning.md", folder / "planning.json"
    values = {
        "machine": machine_name(),
        "loads": result.loads,
        "devices": [as_figures(device) for device in result.devices],
        "median_error": result.median_error,
        "rows": [
            {
                "model": row.model,
                "task": row.task,
                "layout": asdict(row.choice.layout),
                "predicted_s": row.choice.times.seconds,
                "measured_s": row.measured_s,
                "seconds_by_bound": row.choice.times.by_bound,
                "sent_bytes": row.choice.sent,
            }
            for row in result.rows
        ],
    }
    for path, text in ((page, markdown(result)), (data, json.dumps(values, indent=1) + "\n")):
        with atomic_file(path) as scratch:
            scratch.write_text(text, encoding="utf-8")
    return [page, data]
