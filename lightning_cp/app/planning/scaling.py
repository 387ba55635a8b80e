"""The best layout at each number of ranks, for several devices: a table, scaling.json, scaling.md and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from lightning_cp.app.benchmark.plots import colours
from lightning_cp.app.terminal import rich_text
from lightning_cp.files import writing_new
from lightning_cp.planning.devices import GB, Device, as_figures
from lightning_cp.planning.dry_runs import DryRuns
from lightning_cp.planning.layouts import described
from lightning_cp.planning.request import Choice, Plan, Request, closest
from lightning_cp.planning.search import CLASS, plan

_HEAD = ("device", "ranks", "layout", "GB", "s / sample", "speed-up", "bound")
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
        """Yield the cells of the table."""
        first = self.fitting[0][1].sample_s if self.fitting else 0.0
        for found in self.plans:
            request = found.request
            best = found.fastest
            if best is None:
                missing = request.missing_gb(closest(found.excluded))
                yield self.device.name, str(request.ranks), f"none fits: {missing:.3g} GB more", "", "", "", ""
                continue
            share = best.times.by_bound[best.times.bound] / best.times.seconds
            yield (
                self.device.name,
                f"{request.ranks:,}",
                described(best.layout),
                f"{best.peak_bytes / GB + request.reserved_gb:.1f}",
                f"{best.sample_s:.3g}",
                f"{first / best.sample_s:.3g}",
                f"{best.times.bound} {share:.0%}",
            )

    def limits(self) -> list[str]:
        """Return one line for each degree: up to which it pays, and what bounds it from there on."""
        return [line for name in ("cfg", "ulysses", "ring", "ranks") for line in [self._limit(name)] if line]

    def _limit(self, name: str) -> str | None:
        """Return the smallest degree that makes a step less than 15 % faster than half of it does.

        A degree is compared with the other degrees at 1; for `ranks`, the best layouts are.
        """
        fastest: dict[int, Choice] = {}
        for found, best in self.fitting:
            for x in [best] if name == "ranks" else found.choices:
                degrees = {"cfg": x.layout.cfg, "ulysses": x.layout.ulysses, "ring": x.layout.ring}
                degree = x.layout.ranks if name == "ranks" else degrees.pop(name)
                seconds = _seconds(x, name)
                is_alone = name == "ranks" or all(value == 1 for value in degrees.values())
                if is_alone and (degree not in fastest or seconds < _seconds(fastest[degree], name)):
                    fastest[degree] = x
        paid = None
        for degree in sorted(fastest):
            if degree % 2 == 0 and degree // 2 in fastest:
                gain = _seconds(fastest[degree // 2], name) / _seconds(fastest[degree], name)
                if gain < CLASS:
                    return (
                        f"{name} pays up to {degree // 2:,}: {degree:,} is {gain:.2f} times as fast "
                        f"(bound: {fastest[degree].times.bound})"
                    )
                paid = degree
        return None if paid is None else f"{name} pays up to {paid:,}, the most that was planned"


def _seconds(choice: Choice, name: str) -> float:
    """Return the time in which a sample is ready (sampling), or the ranks have computed it (training)."""
    return choice.sample_s if name == "ranks" else choice.times.seconds / (choice.layout.cfg if name == "cfg" else 1)


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
    lines = [f"### {title_of(found)}", "", f"| {' | '.join(_HEAD)} |", "|---|---:|---|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(row)} |" for device in found for row in device.rows()]
    limits = [f"- {device.device.name}: {line}" for device in found for line in device.limits()]
    return "\n".join([*lines, *([""] if limits else []), *limits, ""])


def write(found: Sequence[Scaling], folder: Path) -> None:
    """Write scaling.json, scaling.md and scaling.png."""
    content = [
        {
            "device": as_figures(device.device),
            "limits": device.limits(),
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
        with writing_new(folder / name):
            (folder / name).write_text(text, encoding="utf-8")
    draw(found, folder / "scaling.png")


def draw(found: Sequence[Scaling], path: Path) -> None:
    """Draw the time of a sample over the ranks, with the line of perfect scaling, and the shares of its bounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 + 3 * len(found), 3.4), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(found))
    palette = colours([x.device.name for x in found])
    names = dict.fromkeys(name for x in found for _, choice in x.fitting for name in choice.times.by_bound)
    shades = colours(tuple(dict.fromkeys(("compute", "host", *names))))
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
