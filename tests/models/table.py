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
    "grid": ("grid",),
    "unified": ("unified", "unified3"),
    "checkpointing": ("replay",),
}
_HEAD = """# Models

Every class of diffusers 0.42.1 with a plan, and the largest error of any output and any parameter's gradient, compared
with one process, relative to the largest value, in float64. Each is a tiny model of `tests/models` with batch size 2,
an odd number of tokens, and padding if it takes a mask, at the numbers of ranks in the heading. For another model,
[write a plan](plans.md).

The table is written by the next command. Today it tries grids, and other modes at more than 3 ranks but for unified, on
a third of the classes; the figures below are from a run that tried all modes on all classes.

    LIGHTNING_CP_MODELS_TABLE=docs/models.md pytest -q -m "full or not full" tests/models/test_models.py
"""


_BY_CALL = "`cfg=2`, `pipe` or `patches`"  # ranks then make different calls, see `Plan.keeps_keys`


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
    lines = [_HEAD, f"| class | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for kind in sorted(REGISTERED):
        rows = [x for x in measured if x.kind == kind]
        cells = [_worst([x for x in rows if x.mode in modes]) for modes in _COLUMNS.values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += not_supported()
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def not_supported() -> list[str]:
    """The lines of the page about what is not supported, which are not measured."""
    lines = ["", "## Not supported", "", "These arguments of classes with a plan raise an error that names them:", ""]
    for kind, plan in sorted(REGISTERED.items()):
        refused = {f"`{name}`": why for name, why in plan.refused.items()}
        refused |= {f"`{name}`": f"with {_BY_CALL}, {why}" for name, why in plan.keeps_keys.items()}
        refused |= {f"attention backend `{name}`": why for name, why in plan.refused_backends.items()}
        for why in dict.fromkeys(refused.values()):
            lines.append(f"- {kind}, {', '.join(name for name, x in refused.items() if x == why)}: {why}.")
    lines += ["", "These classes cannot have a plan. Data parallelism works with them.", ""]
    lines += [f"- {name}: {why}." for name, why in sorted(REFUSED.items())]
    lines += [f"- all of `{prefix.rstrip('.')}`: {why}." for prefix, why in REFUSED_MODULES.items()]
    return lines


def _worst(rows: Sequence[Measured]) -> str:
    if not rows:
        return "-"
    error = max(max(x.output, x.gradient) for x in rows)
    return f"{error:.0e}" if all(x.passed for x in rows) else f"**{error:.0e}**"
