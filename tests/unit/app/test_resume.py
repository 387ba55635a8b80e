"""Files that checking `resume=last` reads."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir

from lightning_cp.app.runs.recipe import check_config
from lightning_cp.checkpoint import manifest
from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint
from lightning_cp.launch import Machine

CONF = str(Path(__file__).parents[3] / "conf")


@pytest.mark.parametrize("resume", ["last", "by name"])
def test_only_the_newest_checkpoint_is_verified_and_only_once(resume: str, tmp_path: Path) -> None:
    states = {"model": {"weight": torch.zeros(3)}}
    for run in ("a", "b"):
        for step in (1, 2):
            newest = save_checkpoint(tmp_path / run / "checkpoints", Checkpoint(step, states, {"seed": 0}))
    given = [f"output_root={tmp_path}", f"run_dir={tmp_path}/c", f"resume={resume if resume == 'last' else newest}"]
    with initialize_config_dir(CONF, version_base="1.3"):
        config = compose("train", overrides=[*given, "seed=0"])
    with mock.patch.object(manifest.FileEntry, "of", wraps=manifest.FileEntry.of) as read:
        checked = check_config(config, Machine(cores=2), None).config
    assert checked.resume == str(newest)
    assert [call.args[0] for call in read.call_args_list] == [newest / "model.safetensors"]
