"""Write the results as a Markdown page."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_cp.files import writing_new
from lightning_cp.recipes.benchmarks.gpu.results import Check, Result, Results
from lightning_cp.recipes.planning.timing import machine_name


def write_page(results: Results, stages: Sequence[str], folder: Path, *, device: str) -> Path:
    """Write `gpu.md` into `folder`. Returns: its path.

    Args:
        results: results by stage; missing stages are listed as not run.
        stages: all stages, in order.
        device: "cuda", or "cpu" for a rehearsal.
    """
    checks = [(name, check) for name, items in results.items() for check in checks_of(items)]
    missed = [[name, c.name, c.value, c.goal] for name, c in checks if c.passed is False]
    lines = ["# One GPU", "", f"Measured on {_machine()} with", "", "    python recipes/bench.py bench=gpu", ""]
    if device == "cpu":
        lines += ["**A rehearsal on CPU with small sizes: these numbers do not apply to a GPU.**", ""]
    lines += [f"{sum(c.passed is True for _, c in checks)} goals met, {len(missed)} missed.", ""]
    lines += _table(["stage", "result", "seconds"], [_summary(name, results.get(name)) for name in stages])
    lines += ["", "## Goals missed", "", *_table(["stage", "check", "value", "goal"], missed)] if missed else []
    for name, items in results.items():
        lines += ["", f"## Stage `{name}`"]
        for title, rows in tables_of(items).items():
            lines += ["", f"### {title}", "", *_table(rows[0], rows[1:])]
    page = folder / "gpu.md"
    with writing_new(page):
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def checks_of(items: dict[str, Result]) -> list[Check]:
    """Return the checks of a stage."""
    return [check for result in items.values() for check in result.checks]


def errors_of(items: dict[str, Result]) -> str:
    """Return what failed in a stage; "" if nothing did."""
    return "; ".join(f"{name}: {result.error}" for name, result in items.items() if result.error)


def tables_of(items: dict[str, Result]) -> dict[str, list[list[str]]]:
    """Return the tables of a stage, by title: columns and rows. Of tests: how many of each file passed."""
    tables: dict[str, list[list[str]]] = {}
    for title, columns, cells in (row for result in items.values() for row in result.rows):
        tables.setdefault(title, [columns]).append(cells)
    files: dict[str, list[bool | None]] = {}
    for name in (name for name in items if "::" in name):
        files.setdefault(name.partition("::")[0], []).extend(check.passed for check in items[name].checks)
    for file, passed in files.items():
        counts = [str(passed.count(x)) for x in (True, False, None)]
        tables.setdefault("Tests", [["file", "passed", "failed", "skipped"]]).append([file, *counts])
    return tables


def _summary(name: str, items: dict[str, Result] | None) -> list[str]:
    if items is None:
        return [name, "not run", ""]
    passed = [check.passed for check in checks_of(items) if check.passed is not None]
    missed = passed.count(False)
    text = errors_of(items) or (f"{missed} goals missed" if missed else "all goals met" if passed else "no goals")
    return [name, text.replace("\n", " ")[:300], f"{sum(x.seconds for x in items.values()):.0f}"]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def _machine() -> str:
    import diffusers
    import torch

    versions = f"diffusers {diffusers.__version__}, Python {platform.python_version()}"
    if torch.cuda.is_available():
        versions += f", CUDA {torch.version.cuda}"
    return f"{machine_name()}, {versions}"
