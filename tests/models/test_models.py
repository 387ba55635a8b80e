"""Every class with a plan: outputs and gradients equal those of one process (`check_plan`).

CI spreads the modes over the classes. The whole matrix, and the table that shows it:

    LIGHTNING_CP_MODELS_TABLE=docs/models.md pytest -q -m "full or not full" tests/models/test_models.py
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from lightning_cp import check_plan
from lightning_cp.plans import REGISTERED
from tests.harness import RankPool
from tests.models import FIRST, TINY
from tests.models.modes import MODES
from tests.models.table import Measured, write_table
from tests.models.tiny import dense_flex_attention

_TRIALS = [(name, mode, 3) for name in TINY for mode in ("ring", "rotation", "ulysses")]
_TRIALS += [
    (name, mode, world) for name in FIRST.values() for world in (2, 4) for mode in ("ring", "rotation", "ulysses")
]
_TRIALS += [(name, mode, 4) for name in TINY for mode in ("unified", "grid")]
_TRIALS += [(name, "replay", 3) for name in FIRST.values()]
_TRIALS += [(name, mode, 6) for name in FIRST.values() for mode in ("unified", "unified3", "grid")]
_SPREAD = [("ring", 3), ("ulysses", 3), ("rotation", 3)]
_SPECIAL = [("flux", "grid", 4), ("ltx_timestep_column", "ring", 3), ("lumina_next_proportional", "ulysses", 3)]


_measured: list[Measured] = []


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    yield
    if "LIGHTNING_CP_MODELS_TABLE" in os.environ:
        write_table(Path(os.environ["LIGHTNING_CP_MODELS_TABLE"]), _measured)


def _in_ci(name: str, mode: str, world: int) -> bool:
    """A trial of three ranks of each class's first entry, and of every eighth class one of unified attention."""
    if name == FIRST[TINY[name].kind] and (mode, world) == _SPREAD[list(TINY).index(name) % len(_SPREAD)]:
        return True
    return (name in list(FIRST.values())[::8] and (mode, world) == ("unified", 4)) or (name, mode, world) in _SPECIAL


def _check(rank: int, world: int, name: str, mode: str) -> tuple[float, float, str] | None:
    """Errors, and what differs; None for a class that cannot be checkpointed."""
    tiny = TINY[name]
    model = tiny.build()
    if mode == "replay":
        if not model._supports_gradient_checkpointing:
            return None
        model.enable_gradient_checkpointing()
    arguments = tiny.arguments()
    if "return_dict" in inspect.signature(type(model).forward).parameters:  # Z-Image's ControlNet has none
        arguments["return_dict"] = False
    with dense_flex_attention():
        found = check_plan(model, arguments, MODES[mode](world), training=tiny.training)
    assert found.outputs, "the model has an output"
    known = [pattern.replace(".-1.", ".*.") for pattern in REGISTERED[tiny.kind].unused]
    idle = [x.name for x in found.gradients if x.note and not any(fnmatchcase(x.name, y) for y in known)]
    assert not idle, f"{idle} get no gradient, which the plan does not say"
    return found.output_error, found.gradient_error, "" if found.passed else str(found)


@pytest.mark.parametrize(
    ("name", "mode", "world"),
    [pytest.param(*trial, marks=() if _in_ci(*trial) else pytest.mark.full) for trial in _TRIALS],
)
def test_a_class_is_exact(run_ranks: RankPool, name: str, mode: str, world: int) -> None:
    found = run_ranks(world, _check, name, mode)[0]  # the same on all ranks
    if found is None:
        return
    output, gradient, differing = found
    _measured.append(Measured(TINY[name].kind, name, mode, world, output, gradient, passed=not differing))
    assert not differing, differing


def test_every_class_with_a_plan_is_tried() -> None:
    assert {tiny.kind for tiny in TINY.values()} >= set(REGISTERED)
