"""The best layout at each number of ranks, for several devices: a table, scaling.json, scaling.md and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

from rich.table import Table

from lightning_cp.app.benchmark.plots import colours
from lightning_cp.app.planning.limits import DEGREES, Limit, limits_of
from lightning_cp.app.terminal import rich_text
from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.files import writing_new
from lightning_cp.planning.devices import GB, Device, as_figures
from lightning_cp.planning.dry_runs import DryRuns
from lightning_cp.planning.layouts import described
from lightning_cp.planning.request import Choice, Plan, Request, closest
from lightning_cp.planning.search import CLASS, plan
from lightning_cp.planning.step import Layout

_HEAD = ("device", "ranks", "layout", "GB", "s / sample", "speed-up", "bound")
_BOUNDS = ("compute", "host", "ulysses", "ring", "world", "weights", "context")  # the same colours in all plots
_UNITS = {"train": "s / sample", "sample": "s / sample and step"}


@dataclass(frozen=True)
class Scaling:
    """Plans of one device, by the number of ranks."""

    device: Device
    plans: tuple[Plan, ...]

    @property
    def fitting(self) -> list[tuple[Plan, Choice]]:
        """The plans in which a layout fits, each with its fastest one."""
        return [(x, x.fastest) for x in self.plans if x.fastest is not None]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of the table. Layouts that differ in data ranks only and have the same bound share a row."""
        first = self.fitting[0][1].sample_s if self.fitting else 0.0
        for kind, group in groupby(self.plans, key=_kind):
            plans = list(group)
            ranks = _range([f"{x.request.ranks:,}" for x in plans])
            request = plans[-1].request
            if kind is None:
                missing = min(x.request.missing_gb(closest(x.excluded)) for x in plans)
                yield self.device.name, ranks, f"none fits: {missing:.3g} GB more", "", "", "", ""
                continue
            best = [x.fastest for x in plans if x.fastest is not None]
            shares = [f"{x.times.by_bound[x.times.bound] / x.times.seconds:.0%}" for x in best]
            yield (
                self.device.name,
                ranks,
                _described([x.layout for x in best], request.task),
                _range([f"{x.peak_bytes / GB + request.reserved_gb:.1f}" for x in best]),
                _range([f"{x.sample_s:.3g}" for x in best]),
                _range([_times(first / x.sample_s) for x in best]),
                f"{best[0].times.bound} {_range(shares)}",
            )

    def limits(self) -> list[Limit]:
        """Return up to which degrees more ranks pay, and what bounds the next one."""
        return limits_of(self.plans)


def _kind(found: Plan) -> tuple[Layout, str] | None:
    """Return what plans of one row have in common."""
    best = found.fastest
    return None if best is None else (replace(best.layout, data=1), best.times.bound)


def _described(layouts: Sequence[Layout], task: str) -> str:
    """Return layouts that differ in data ranks only as a text."""
    first, last = layouts[0], layouts[-1]
    same = replace(first, data=1)
    if task == "sample" and last.data > 1:
        return f"{described(same)} (ranks above {same.ranks} sample other prompts)"
    if first == last:
        return described(first)
    rest = described(same)
    data = f"data {first.data:,}–{last.data:,}"
    return data + rest.removeprefix("one rank") if rest.startswith("one rank") else f"{data} × {rest}"


def _times(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"


def _range(cells: Sequence[str]) -> str:
    return cells[0] if cells[0] == cells[-1] else f"{cells[0]}–{cells[-1]}"


def scale(request: Request, devices: Sequence[Device], ranks: Sequence[int]) -> list[Scaling]:
    """Plan each number of ranks of each device.

    For sampling, it ends once four times as many ranks make a sample less than 15 % faster: the ranks of larger numbers
    only sample other prompts.
    Raises: ValueError: see `plan`.
    """
    runs = DryRuns()
    found = []
    for device in devices:
        plans: list[Plan] = []
        for number in sorted(ranks):
            plans.append(plan(replace(request, device=device, ranks=number), runs, advise=False))
            fits = [x.fastest for x in plans[-3:] if x.fastest is not None]
            if request.task == "sample" and len(fits) == 3 and fits[0].sample_s < CLASS * fits[-1].sample_s:
                break
        found.append(Scaling(device, tuple(plans)))
    return found


def title_of(found: Sequence[Scaling]) -> str:
    """Return what was planned, in one line."""
    request = found[0].plans[0].request
    lora = "" if request.lora is None else f", LoRA of rank {request.lora.rank}"
    return (
        f"{request.model.name}, {request.task}{lora}, {request.model.tokens or 0:,} tokens, batch {request.batch_size}"
    )


def table(found: Sequence[Scaling]) -> Table:
    """Return the table for a terminal."""
    shown = Table(title=rich_text(title_of(found)), title_justify="left")
    for column in _HEAD:
        shown.add_column(column, justify="left" if column in ("device", "layout", "bound") else "right")
    for device in found:
        for row in device.rows():
            shown.add_row(*row)
        shown.add_section()
    return shown


def markdown(found: Sequence[Scaling]) -> str:
    """Return the table and the limits as Markdown."""
    limits = {device.device.name: {x.name: x.cell for x in device.limits()} for device in found}
    names = [name for name in DEGREES if any(name in cells for cells in limits.values())]
    lines = [f"### {title_of(found)}", "", f"| pays up to | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    lines += [
        f"| {' | '.join([device, *(cells.get(name, '') for name in names)])} |" for device, cells in limits.items()
    ]
    lines = lines if names else lines[:1]
    lines += ["", f"| {' | '.join(_HEAD)} |", "|---|---:|---|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(row)} |" for device in found for row in device.rows()]
    return "\n".join([*lines, ""])


def write(found: Sequence[Scaling], folder: Path) -> None:
    """Write scaling.json, scaling.md and scaling.png."""
    content = [
        {
            "device": as_figures(device.device),
            "limits": [str(x) for x in device.limits()],
            "rows": [
                {
                    "layout": asdict(x.layout),
                    "sample_s": x.sample_s,
                    "peak_bytes": x.peak,
                    "seconds_by_bound": x.times.by_bound,
                }
                for _, x in device.fitting
            ],
        }
        for device in found
    ]
    for name, text in (("scaling.json", json.dumps(content, indent=1) + "\n"), ("scaling.md", markdown(found))):
        with atomic_file(folder / name) as scratch:
            scratch.write_text(text, encoding="utf-8")
    draw(found, folder / "scaling.png")


def draw(found: Sequence[Scaling], path: Path) -> None:
    """Draw the time of a sample over the ranks, with the line of perfect scaling, and the shares of its bounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 + 3 * len(found), 3.4), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(found))
    palette = colours([x.device.name for x in found])
    names = {name for x in found for _, choice in x.fitting for name in choice.times.by_bound}
    shades = {name: shade for name, shade in colours(_BOUNDS).items() if name in names}
    for axis, device in zip(others, found, strict=True):
        chosen = device.fitting
        ranks, times = [x.layout.ranks for _, x in chosen], [x.sample_s for _, x in chosen]
        colour = palette[device.device.name]
        left.plot(ranks, times, color=colour, marker="o", markersize=4, label=device.device.name)
        if chosen:
            left.plot(ranks, [times[0] * ranks[0] / x for x in ranks], color=colour, linestyle=":", linewidth=0.8)
        bottom = [0.0] * len(chosen)
        for name, shade in shades.items():
            shares = [100 * x.times.by_bound.get(name, 0.0) / x.times.seconds for _, x in chosen]
            axis.bar([str(x) for x in ranks], shares, bottom=bottom, color=shade, label=name)
            bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
        axis.set_title(f"{device.device.name}: share of the time, %", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.tick_params(axis="x", labelrotation=90 if len(ranks) > 8 else 0)
        axis.set_xlabel("ranks", fontsize=8)
    figure.legend(*others[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xlabel("ranks (dotted: perfect scaling)", fontsize=8)
    left.set_title(_UNITS[found[0].plans[0].request.task], fontsize=9)
    left.grid(alpha=0.3)
    left.legend(fontsize=7, frameon=False)
    figure.suptitle(title_of(found), fontsize=10)
    with writing_new(path):
        figure.savefig(path, dpi=90)
