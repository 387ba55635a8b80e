"""Changed plain values of a training run's checkpoint, which no checksum covers: one CheckpointError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp.app.training.state import _WITHOUT_STATE, TrainState
from lightning_cp.checkpoint import CheckpointError
from lightning_cp.checkpoint.manifest import MANIFEST
from lightning_cp.checkpoint.store import save_checkpoint
from lightning_cp.data import GlobalBatchSampler
from lightning_cp.training.ema import WeightAverage
from tests.e2e.recipe import run


def state_of_run() -> TrainState:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = GlobalBatchSampler(8, 2)
    return TrainState(model, model, optimizer, WeightAverage(model), sampler, seed=0, step=3)


FACTS: dict[str, Any] = {
    "the sampler": ("sampler", None),
    "the sampler's step": ("sampler", {**GlobalBatchSampler(8, 2).state_dict(), "step": None}),
    "a negative step of the sampler": ("sampler", {**GlobalBatchSampler(8, 2).state_dict(), "step": -2}),
    "weights without state": (_WITHOUT_STATE, 3),
    "skipped steps": ("skipped", "x"),
    "random states": ("random", None),
    "the state of Python's generator": ("random", "python"),
}


@pytest.mark.parametrize("name", FACTS)
def test_changed_facts_of_a_training_run_are_one_error(tmp_path: Path, name: str) -> None:
    folder = save_checkpoint(tmp_path, state_of_run().snapshot())
    state_of_run().load(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    key, value = FACTS[name]
    if key == "random":
        states: Any = dict(manifest["facts"]["tree"]["dict"])["random"]["list"][0]["dict"]
        (python,) = (pair[1]["tuple"] for pair in states if pair[0] == "python")
        python[:] = python[:3] if value is None else [python[0], None, *python[2:]]
    else:
        manifest["facts"][key] = value
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        state_of_run().load(folder)


def test_the_recipe_names_a_newer_checkpoint_that_it_skips(tmp_path: Path) -> None:
    newest = tmp_path / "outputs" / "a" / "checkpoints" / "step_00000009"
    newest.mkdir(parents=True)
    finished = run("resume=last", f"output_root={tmp_path / 'outputs'}", folder=tmp_path / "outputs" / "run")
    assert finished.exit_code == 2
    skipped, refused = finished.stderr.splitlines()
    assert skipped.startswith(f"skipped the newer checkpoint {newest}: ")
    assert refused.startswith("error: resume=last: there is no complete checkpoint")
