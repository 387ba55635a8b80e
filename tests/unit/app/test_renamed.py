"""Settings that had another name in an earlier version: on the command line, in a configuration and in a run's file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.runs.recipe import check_config
from lightning_cp.app.runs.sampling import check_sampling
from lightning_cp.app.settings.foreign import read_foreign_run
from lightning_cp.app.settings.renamed import RENAMED_IN_SAMPLING, RENAMED_SETTINGS, add_earlier_names
from lightning_cp.app.settings.table import SettingsError
from lightning_cp.launch import Machine

ROOT = Path(__file__).parents[3]


def composed(*arguments: str, recipe: str = "train") -> DictConfig:
    renamed = RENAMED_SETTINGS if recipe == "train" else RENAMED_IN_SAMPLING
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(recipe, overrides=["run_dir=here", *add_earlier_names(arguments, renamed)])


@pytest.mark.parametrize(("earlier", "name"), RENAMED_SETTINGS.items())
@pytest.mark.parametrize("before", ["", "+", "++"])
def test_an_earlier_name_is_an_error_with_the_new_name(earlier: str, name: str, before: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{earlier} was renamed to {name}: use {name}=3$"):
        check_config(composed(f"{before}{earlier}=3"), Machine(cores=2), None)


@pytest.mark.parametrize(("earlier", "name"), RENAMED_IN_SAMPLING.items())
@pytest.mark.parametrize("before", ["", "+", "++"])
def test_an_earlier_name_of_sampling_is_an_error_with_the_new_name(earlier: str, name: str, before: str) -> None:
    assert name in composed(recipe="sample")
    with pytest.raises(SettingsError, match=rf"^{earlier} was renamed to {name}: use {name}=3$"):
        check_sampling(composed(f"{before}{earlier}=3", recipe="sample"), Machine(cores=2), None)


def test_the_command_line_of_sampling_gets_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "recipes" / "sample.py"), f"hydra.run.dir={tmp_path}/run", "guidance=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: guidance was renamed to guidance_scale: use guidance_scale=2\n"


@pytest.mark.parametrize("name", RENAMED_SETTINGS.values())
def test_every_new_name_is_a_setting(name: str) -> None:
    assert OmegaConf.select(composed(), name) is not None
    arguments = [f"{name}=1", "hydra.run.dir=clip_norm", "ring=1", "--multirun"]
    assert add_earlier_names(arguments) == arguments


def test_the_command_line_gets_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "recipes" / "train.py"), f"hydra.run.dir={tmp_path}/run", "sampling.count=7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    new = "sampling.num_samples"
    assert done.stderr == f"error: sampling.count was renamed to {new}: use {new}=7\n"


@pytest.mark.parametrize("trust", [False, True])
def test_the_settings_of_an_earlier_run_are_renamed(trust: bool, tmp_path: Path) -> None:
    config: Any = OmegaConf.to_container(check_config(composed("model=wan_tiny"), Machine(cores=2), None).config)
    config["sampling"] = {"count": 12, "num_steps": 3, "guidance": 1.5, "every": None}
    config["clip_norm"], config["drop_probability"] = config.pop("gradient_clip_val"), config.pop("cond_dropout")
    path = tmp_path / "resolved.yaml"
    OmegaConf.save(OmegaConf.create(config), path)
    read = read_foreign_run(path, trust=trust)
    expected = {"num_samples": 12, "num_inference_steps": 3, "guidance_scale": 1.5}
    assert {key: read.sampling[key] for key in expected} == expected
    assert all(OmegaConf.select(read, earlier) is None for earlier in RENAMED_SETTINGS)
    if trust:
        assert (read.gradient_clip_val, read.cond_dropout) == (1.0, 0.1)
