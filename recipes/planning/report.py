"""Show the result of a search: a table, and plan.json."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.planning.devices import GB
from lightning_cp.planning.layouts import described
from lightning_cp.planning.search import Choice, SearchResult
from lightning_cp.recipes.terminal import rich_text

_UNITS = {"train": "ms / sample", "sample": "ms / sample and step"}


def table(result: SearchResult, rows: int) -> Table:
    """Return a table of the best layouts. Args: rows: number of layouts."""
    request = result.request
    shown = Table(
        title=rich_text(f"{request.model.name}, {request.task}, {request.ranks} × {request.device.name}"),
        title_justify="left",
    )
    numbers = ("compute", "host", "links", "GB sent")
    for column in ("", "layout", "GB", "ms / step", _UNITS[request.task], "bound", *numbers):
        shown.add_column(column, justify="left" if column in ("", "layout", "bound") else "right")
    for number, choice in enumerate(result.choices[:rows]):
        parts = choice.times.by_bound
        links = sum(value for name, value in parts.items() if name not in ("compute", "host"))
        shares = (f"{part / choice.times.seconds:.0%}" for part in (parts["compute"], parts.get("host", 0.0), links))
        shown.add_row(
            "→" if number == 0 else "=" if number < result.equal else "",
            described(choice.layout),
            f"{choice.step.peak_bytes / GB + request.taken_gb:.1f}",
            f"{1e3 * choice.times.seconds:,.1f}",
            f"{1e3 * choice.sample_s:,.1f}",
            choice.times.bound,
            *shares,
            f"{sum(choice.step.sent_bytes().values()) / GB:.2f}",
        )
    return shown


def notes(result: SearchResult) -> list[str]:
    """Return the lines below the table: the rest, why layouts are excluded, and how far times can be believed."""
    device, lines = result.request.device, []
    if result.equal > 1:
        lines.append("= within 15 % of the fastest: predictions cannot order these, so the simplest one is chosen")
    if result.request.task == "sample":
        weights = ", ".join(f"{name} {gb:.1f} GB" for name, gb in result.request.others.items())
        lines.append(f"planned: a step of the transformer{f', with the weights of {weights}' if weights else ' alone'}")
        lines.append("not planned: PipeFusion; encoding; decoding, which needs more memory than a step in long clips")
        lines += [f"not counted: {x}" for x in result.request.uncounted]
    reasons = Counter(_kind(x.reason) for x in result.excluded)
    lines += [f"{count} layouts excluded: {reason}" for reason, count in reasons.most_common()]
    if result.request.task == "train" and any(x.layout.sharded for x in result.choices):
        lines.append("not planned: HSDP (replicate above 1), which shards weights over a part of the ranks")
    if not device.is_calibrated:
        lines.append(
            f"times are not calibrated (rates of {device.name}: {device.source}); bytes and memory do not depend on "
            "them. To measure rates: lightning-cp plan calibrate=true ranks=…"
        )
    return lines


def _kind(reason: str) -> str:
    return "not enough memory" if reason.startswith("needs ") and " GB of " in reason else reason


def as_json(result: SearchResult, *, lora_rank: int | None = None) -> dict[str, Any]:
    """Return a result as values for JSON."""
    request = result.request
    return {
        "model": request.model.name,
        "task": request.task,
        "ranks": request.ranks,
        "memory_gb": request.memory,
        "reserved_gb": request.reserved_gb,
        "tokens": request.model.tokens,
        "others_gb": dict(request.others),
        "lora_rank": lora_rank,
        "device": asdict(request.device),
        "calibrated": request.device.is_calibrated,
        "reason": result.reason,
        "overrides": None if result.best is None else request.overrides(result.best.layout),
        "equal": result.equal,
        "choices": [_choice(x, result) for x in result.choices],
        "excluded": [
            {"layout": asdict(x.layout), "reason": x.reason, "needs_gb": x.needs_bytes / GB or None}
            for x in result.excluded
        ],
    }


def _choice(choice: Choice, result: SearchResult) -> dict[str, Any]:
    return {
        "layout": asdict(choice.layout),
        "overrides": result.request.overrides(choice.layout),
        "step_s": choice.times.seconds,
        "sample_s": choice.sample_s,
        "bound": choice.times.bound,
        "seconds_by_bound": choice.times.by_bound,
        "peak_bytes": choice.step.peak,
        "flops": choice.step.flops,
        "sent_bytes": choice.step.sent_bytes(),
    }


def write_json(result: SearchResult, path: Path, *, lora_rank: int | None) -> None:
    """Write plan.json. Readers see the older file or the whole new one."""
    with atomic_file(path) as scratch:
        scratch.write_text(json.dumps(as_json(result, lora_rank=lora_rank), indent=1) + "\n", encoding="utf-8")
