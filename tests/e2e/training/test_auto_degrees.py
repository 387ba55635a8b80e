"""`ring=auto ulysses=auto`: the planner chooses the degrees of a run, which are saved and logged."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.e2e.recipe import SMALL, run


@pytest.mark.full
def test_a_run_trains_with_the_degrees_that_the_planner_chooses(tmp_path: Path) -> None:
    settings = (*SMALL, "strategy=cp", "devices=2", "data_parallel=1", "max_steps=2", "progress=false")
    planned = run(*settings, "ring=auto", "ulysses=auto", folder=tmp_path / "planned")
    assert planned.exit_code == 0, planned.stderr
    saved = OmegaConf.load(planned.folder / ".hydra" / "resolved.yaml")
    degrees = f"ring={saved.ring} ulysses={saved.ulysses}"
    assert saved.ring * saved.ulysses == 2
    assert [line for line in planned.stdout.splitlines() if line.startswith(f"{degrees}: 2 ranks; ")]
    by_hand = run(*settings, *degrees.split(), folder=tmp_path / "by_hand")
    assert planned.losses == by_hand.losses
    resumed = run(
        *settings, "ring=auto", "ulysses=auto", "max_steps=3", f"resume={planned.folder}", folder=tmp_path / "resumed"
    )
    assert f"{degrees}: 2 ranks; those of the run that is resumed" in resumed.stdout
    assert len(resumed.losses) == 3
