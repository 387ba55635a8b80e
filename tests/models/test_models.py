"""Every class with a plan: outputs and gradients equal those of one process (`check_plan`).

By default, the modes are spread over one class of each kind of plan. All modes, and the table that shows it:

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
from tests.harness.cases import in_turn
from tests.models import FIRST, TINY
from tests.models.modes import MODES
from tests.models.table import Measured, write_table
from tests.models.tiny import dense_flex_attention

_AT_3 = ("ring", "ulysses", "rotation", "replay")
_LARGE = (("grid", 4), ("ring", 4), ("ulysses", 4), ("rotation", 4), ("unified", 6), ("unified3", 6), ("grid", 6))
_DEFAULT = (  # one of each kind of plan, each in one mode at 3 ranks
    *(("flux", "ulysses", 3), ("sd3", "rotation", 3), ("qwen_image", "ring", 3)),  # text joined to the image
    *(("wan", "rotation", 3), ("pixart", "ulysses", 3), ("sana", "ring", 3)),  # cross attention, linear attention
    *(("hunyuan_video", "ulysses", 3), ("z_image", "ring", 3), ("cogvideox", "rotation", 3)),  # segments, padding
    *(("ltx2", "ring", 3), ("ace_step", "ulysses", 3), ("control_flux", "rotation", 3)),  # sound, ControlNets
    *(("qwen_image21", "ring", 3), ("omnigen", "ulysses", 3)),  # causal segments
    *(("flux", "unified", 4), ("wan", "replay", 3), ("flux", "grid", 4)),
)
# every class in all modes of 3 ranks and with both degrees; a third of them at more ranks; other inputs in one mode
_TRIALS = [(name, (mode,), world) for name, mode, world in _DEFAULT]
_TRIALS += [(name, tuple(x for x in _AT_3 if (name, x, 3) not in _DEFAULT), 3) for name in FIRST.values()]
_TRIALS += [(name, ("unified",), 4) for name in FIRST.values() if (name, "unified", 4) not in _DEFAULT]
_TRIALS += [(name, (mode,), 3) for name, mode in in_turn([x for x in TINY if x not in FIRST.values()], _AT_3[:3])]
_TRIALS += [(name, (mode,), world) for name, (mode, world) in in_turn(list(FIRST.values())[::3], _LARGE)]


_measured: list[Measured] = []


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    yield
    if "LIGHTNING_CP_MODELS_TABLE" in os.environ:
        write_table(Path(os.environ["LIGHTNING_CP_MODELS_TABLE"]), _measured)


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


def _check_all(rank: int, world: int, name: str, modes: tuple[str, ...]) -> dict[str, tuple[float, float, str] | None]:
    return {mode: _check(rank, world, name, mode) for mode in modes}


@pytest.mark.parametrize(("name", "modes", "world"), _TRIALS, ids=lambda x: "-".join(x) if isinstance(x, tuple) else x)
@pytest.mark.default(len(_DEFAULT))
def test_a_class_is_exact(run_ranks: RankPool, name: str, modes: tuple[str, ...], world: int) -> None:
    for mode, found in run_ranks(world, _check_all, name, modes)[0].items():  # the same on all ranks
        if found is not None:
            output, gradient, differing = found
            _measured.append(Measured(TINY[name].kind, name, mode, world, output, gradient, passed=not differing))
            assert not differing, f"{mode}: {differing}"


def test_every_class_with_a_plan_is_tried() -> None:
    assert {tiny.kind for tiny in TINY.values()} >= set(REGISTERED)
