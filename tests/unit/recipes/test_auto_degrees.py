"""`ring=auto` and `ulysses=auto` of recipes/train.py: what they need, and when a resumed run keeps its degrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint
from lightning_cp.launch import Machine
from lightning_cp.planning.degrees import Degrees
from lightning_cp.recipes.runs.recipe import CheckedRun, check_config
from lightning_cp.recipes.settings.table import SettingsError
from lightning_cp.recipes.settings.world import resolve_world
from lightning_cp.recipes.training import planned
from tests.unit.recipes.composed import composed
from tests.unit.recipes.test_settings import GpuMachine, TestMachine

AUTO = ("strategy=cp", "ring=auto", "ulysses=auto")


def _config(*overrides: str) -> Any:
    return composed("train", "run_dir=/runs/here", "output_root=/runs", *overrides)


def _check(*overrides: str, machine: Machine | None = None) -> CheckedRun:
    return check_config(_config(*overrides), machine or TestMachine(cores=2), None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Replace the planner by one that puts all ranks in one Ulysses group. Returns: ranks and GPU of each question."""
    questions: list[tuple[int, Any]] = []

    def plan(config: Any, ranks: int, *, node_ranks: int, gpu: Any) -> Degrees:
        questions.append((ranks, gpu))
        return Degrees(1, ranks, f"ring=1 ulysses={ranks}: {ranks} ranks; simple")

    monkeypatch.setattr(planned, "plan_training", plan)
    return questions


def test_degrees_are_in_the_resolved_configuration(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = _check(*AUTO, "devices=2")
    assert (run.config.ring, run.config.ulysses, run.config.strategy.ulysses, run.world.size) == (1, 2, 2, 2)
    assert run.degrees == "ring=1 ulysses=2: 2 ranks; simple"
    assert asked == [(2, None)]
    monkeypatch.setattr("lightning_cp.recipes.runs.auto_degrees.describe_gpu", lambda: ("NVIDIA H100", 8))
    assert _check(*AUTO, machine=GpuMachine(cores=2)).config.devices == 2
    assert asked[1:] == [(2, ("NVIDIA H100", 8))]


def test_one_rank_has_nothing_to_choose(asked: list[Any]) -> None:
    assert _check(*AUTO, "devices=1").degrees == "ring=1 ulysses=1: 1 ranks; nothing to divide"
    assert _check("ring=auto").config.ring == 1  # strategy=single
    assert _check("strategy=cp", "ring=2").degrees is None
    assert asked == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("ring=auto", "ring=auto needs the number of ranks: set devices"),
        ("ring=auto ulysses=auto devices=2 shares=[1,2]", r"ring=auto ulysses=auto does not work with shares=\[1, 2\]"),
        ("ulysses=auto devices=2 degrees.by_tokens={8:1}", "ulysses=auto does not work with degrees.by_tokens="),
        ("ring=auto devices=6 rotate_method=grid grid=[2,3]", r"ring=auto does not work with grid=\[2, 3\]"),
        ("ring=auto devices=2 batch_size=3 data_parallel=2", "ring=auto: no degrees are possible on 2 ranks"),
    ],
)
def test_settings_that_cannot_be_planned_are_errors(overrides: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        _check("strategy=cp", *overrides.split())


def test_other_recipes_need_degrees() -> None:
    with pytest.raises(SettingsError, match="are for lightning-cp train"):
        resolve_world(_config(*AUTO, "devices=2"), TestMachine(cores=2), None)


@pytest.mark.parametrize(
    ("overrides", "ring", "ulysses"),
    [
        ("devices=4", 2, 2),
        ("devices=4 data_parallel=1", 2, 2),
        ("devices=8", 2, 2),
        ("devices=2", 1, 2),  # the planner's: 2 × 2 does not divide 2 ranks
        ("devices=4 data_parallel=2", 1, 4),  # the planner's
    ],
)
def test_a_resumed_run_keeps_its_degrees_if_they_fit(
    overrides: str, ring: int, ulysses: int, asked: list[Any], tmp_path: Path
) -> None:
    checkpoint = Checkpoint(1, {"model": {"weight": torch.zeros(1)}}, {"seed": 0})
    save_checkpoint(tmp_path / "run" / "checkpoints", checkpoint)
    (tmp_path / "run" / ".hydra").mkdir()
    OmegaConf.save({"ring": 2, "ulysses": 2}, tmp_path / "run" / ".hydra" / "resolved.yaml")
    if (ring, ulysses) == (1, 4):  # two data ranks of 4 ranks would be refused
        with pytest.raises(SettingsError, match="must equal devices=4"):
            _check(*AUTO, *overrides.split(), f"resume={tmp_path / 'run'}")
        return
    run = _check(*AUTO, *overrides.split(), f"resume={tmp_path / 'run'}")
    assert (run.config.ring, run.config.ulysses) == (ring, ulysses)
    assert ("those of the run that is resumed" in str(run.degrees)) == (ring == 2)
    assert len(asked) == (ring == 1)
