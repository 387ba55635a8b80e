"""docs/models.md, from what the tests measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_cp.plans import REGISTERED
from lightning_cp.plans.refused import REFUSED, REFUSED_MODULES

_COLUMNS = {
    "ring allgather": ("ring",),
    "ring alltoall": ("rotation",),
    "Ulysses": ("ulysses",),
    "unified": ("unified", "unified3"),
    "checkpointing": ("replay",),
}
_HEAD = """# Models

Every class of diffusers 0.42.1 with a plan, and how far it is from one process: the largest error of any output or any
parameter's gradient, relative to its largest value, in float64, over all tiny models of the class (see the last column)
at the numbers of ranks that the head of a column names. 0.42.1's casts to float32 are lifted to float64 for this.
Written by

    LIGHTNING_CP_MODELS_TABLE=docs/models.md pytest -q -m "full or not full" tests/models/test_models.py

Batch 2, odd token counts, and real padding wherever a class takes a mask. A model of your own: [plans.md](plans.md).
"""


@dataclass(frozen=True)
class Measured:
    """One trial of one tiny model; errors as of `check_plan`."""

    kind: str
    name: str
    mode: str
    world: int
    output: float
    gradient: float
    passed: bool


def write_table(file: Path, measured: Sequence[Measured]) -> None:
    """Writes docs/models.md."""
    worlds = {
        column: sorted({x.world for x in measured if x.mode in modes and x.mode != "unified3"})
        for column, modes in _COLUMNS.items()
    }
    heads = [f"{column}, {'/'.join(map(str, worlds[column])) or '-'}" for column in _COLUMNS]
    lines = [_HEAD, f"| class | {' | '.join(heads)} | tried as |", "|---" * (len(heads) + 2) + "|"]
    for kind in sorted(REGISTERED):
        rows = [x for x in measured if x.kind == kind]
        cells = [_worst([x for x in rows if x.mode in modes]) for modes in _COLUMNS.values()]
        names = ", ".join(dict.fromkeys(x.name for x in rows))
        lines.append(f"| {kind} | {' | '.join(cells)} | {names} |")
    lines += ["", "## What is refused", "", "Arguments that a class with a plan refuses, by name, with an error:", ""]
    lines += ["| class | argument | why |", "|---|---|---|"]
    for kind, plan in sorted(REGISTERED.items()):
        lines += [f"| {kind} | `{name}` | {why} |" for name, why in plan.refused.items()]
        lines += [f"| {kind} | attention backend `{name}` | {why} |" for name, why in plan.refused_backends.items()]
    lines += ["", "Classes that no plan can carry; data parallelism works:", "", "| class | why |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in sorted(REFUSED.items())]
    lines += [f"| all of `{prefix.rstrip('.')}` | {why} |" for prefix, why in REFUSED_MODULES.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _worst(rows: Sequence[Measured]) -> str:
    if not rows:
        return "-"
    error = max(max(x.output, x.gradient) for x in rows)
    return f"{error:.0e}" if all(x.passed for x in rows) else f"**{error:.0e}**"
