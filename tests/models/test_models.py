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
_LARGE = (*(("grid", 4), ("ring", 4), ("ulysses", 4), ("rotation", 4), ("unified", 6), ("unified3", 6), ("grid", 6)),)
_DEFAULT = (  # one of each kind of plan, each in one mode at 3 ranks
    *(("flux", "ulysses", 3), ("sd3", "rotation", 3), ("qwen_image", "ring", 3)),  # text joined to the image
    *(("wan", "rotation", 3), ("pixart", "ulysses", 3), ("sana", "ring", 3)),  # cross attention, linear attention
    *(("hunyuan_video", "ulysses", 3), ("z_image", "ring", 3), ("cogvideox", "rotation", 3)),  # segments, padding
    *(("ltx2", "ring", 3), ("ace_step", "ulysses", 3), ("control_flux", "rotation", 3)),  # sound, ControlNets
    *(("qwen_image21", "ring", 3), ("omnigen", "ulysses", 3)),  # causal segments
    *(("lumina_next_proportional", "ring", 3), ("cogview4_masked", "ring", 3)),  # scales, masks of pairs
    *(("latte", "ulysses", 3), ("motif_video", "ulysses", 3)),  # times of each frame, encoders
    *(("flux", "unified", 4), ("wan", "replay", 3), ("flux", "grid", 4)),
)
# every class in the modes of 3 ranks and with both degrees, its other inputs in one mode each; a third at more ranks
_OTHERS = in_turn([name for name in TINY if name not in FIRST.values()], _AT_3[:3])
_TRIALS: list[tuple[str, tuple[tuple[str, str], ...], int]] = [
    (name, ((name, mode),), world) for name, mode, world in _DEFAULT
]
_TRIALS += [
    (
        kind,
        (
            *((name, mode) for mode in _AT_3 if (name, mode, 3) not in _DEFAULT),
            *((other, mode) for other, mode in _OTHERS if TINY[other].kind == kind),
        ),
        3,
    )
    for kind, name in FIRST.items()
]
_TRIALS += [(x, ((x, "unified"),), 4) for x in FIRST.values() if (x, "unified", 4) not in _DEFAULT]
_TRIALS += [(name, ((name, mode),), world) for name, (mode, world) in in_turn(list(FIRST.values())[::3], _LARGE)]


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


def _check_all(rank: int, world: int, trials: tuple[tuple[str, str], ...]) -> list[tuple[float, float, str] | None]:
    return [_check(rank, world, name, mode) for name, mode in trials]


@pytest.mark.parametrize(
    ("name", "trials", "world"),
    _TRIALS,
    ids=[f"{name}-{trials[0][1] if len(trials) == 1 else 'all'}-{world}" for name, trials, world in _TRIALS],
)
@pytest.mark.default(len(_DEFAULT))
def test_a_class_is_exact(run_ranks: RankPool, name: str, trials: tuple[tuple[str, str], ...], world: int) -> None:
    everything = zip(trials, run_ranks(world, _check_all, trials)[0], strict=True)  # the same on all ranks
    for (tiny, mode), found in everything:
        if found is not None:
            output, gradient, differing = found
            _measured.append(Measured(TINY[tiny].kind, tiny, mode, world, output, gradient, passed=not differing))
            assert not differing, f"{tiny}, {mode}: {differing}"


def test_every_class_with_a_plan_is_tried() -> None:
    assert {tiny.kind for tiny in TINY.values()} >= set(REGISTERED)
