"""Sampling from a run of an untrusted author: its configuration cannot run code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from lightning_cp.app.runs.recipe import check_config
from lightning_cp.app.sampling.trained import load_denoiser
from lightning_cp.app.settings.foreign import check_model_classes
from lightning_cp.app.settings.table import SettingsError
from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint
from lightning_cp.launch import Machine
from tests.e2e.recipe import ROOT, started

RECIPE = ROOT / "recipes" / "sample.py"


def attacks(ran: Path, script: Path) -> dict[str, dict[str, Any]]:
    """Model configurations that create the file `ran` when they are built."""
    script.write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nf = None\n")
    touch = ["touch", str(ran)]
    return {
        "our own loader of files": {"_target_": "lightning_cp.launch.rank.load_target", "target": f"{script}:f"},
        "a command": {"_target_": "os.system", "_args_": [" ".join(touch)]},
        "evaluated": {"_target_": "builtins.eval", "_args_": [f"open({str(ran)!r}, 'w')"]},
        "a script": {"_target_": "runpy.run_path", "_args_": [str(script)]},
        "an argument of a listed class": {
            "_target_": "lightning_cp.app.denoisers.WanDenoiser",
            "num_classes": {"_target_": "subprocess.check_call", "_args_": [touch]},
        },
        "a list in an argument": {
            "_target_": "lightning_cp.app.denoisers.WanDenoiser",
            "transformer": [
                [{"_target_": "pathlib.Path.touch", "self": {"_target_": "pathlib.Path", "_args_": [str(ran)]}}]
            ],
        },
        "a method of a listed class": {
            "_target_": "lightning_cp.app.denoisers.WanDenoiser",
            "transformer": {
                "_target_": "operator.methodcaller",
                "_args_": [{"_target_": "os.open", "_args_": [str(ran), 64]}],
            },
        },
    }


NAMES = list(attacks(Path("/tmp/x"), Path("/dev/null")))


def someones_run(folder: Path, model: dict[str, Any]) -> Path:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = check_config(compose("train", overrides=["run_dir=here"]), Machine(cores=2), None).config
    save_checkpoint(folder / "checkpoints", Checkpoint(3, {"model": {"x": torch.zeros(1)}}, {}))
    (folder / ".hydra").mkdir()
    OmegaConf.save({**config, "model": model}, folder / ".hydra" / "resolved.yaml")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_run_whose_configuration_would_run_code_is_not_built(name: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    config = OmegaConf.create({"model": attacks(ran, tmp_path / "script.py")[name]})
    for give in (config, OmegaConf.to_container(config)):
        with pytest.raises(SettingsError, match="would be called"):
            check_model_classes(give["model"], "here")  # type: ignore[index]
    with pytest.raises(SettingsError, match="would be called"):
        load_denoiser(config, tmp_path)
    assert not ran.exists()
    with pytest.raises((InstantiationException, AttributeError)) as caught:  # what was built is no model
        load_denoiser(config, tmp_path, trust=True)
    # The attack works where it is allowed. Newer releases of Hydra refuse some of these functions, but not ours.
    assert ran.exists() or "blocklisted" in str(caught.value)


def sampled(*overrides: str, folder: Path) -> tuple[int, str]:
    with started(*overrides, "progress=false", folder=folder, script=RECIPE) as process:
        _, stderr = process.communicate(timeout=150)
        return process.returncode, stderr


@pytest.mark.parametrize("source", ["its folder", pytest.param("last", marks=pytest.mark.full)])
def test_the_recipe_refuses_it_in_one_line(source: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    run = someones_run(tmp_path / "theirs" / "run", attacks(ran, tmp_path / "script.py")["our own loader of files"])
    given = (f"output_root={run.parent}",) if source == "last" else (f"source={run}",)
    code, stderr = sampled(*given, folder=tmp_path / "ours")
    assert code == 2, stderr
    (line,) = stderr.splitlines()
    assert line.startswith(
        f"error: {run / '.hydra' / 'resolved.yaml'}: model._target_=lightning_cp.launch.rank.load_target"
    )
    assert "trust=true" in line
    assert not ran.exists()


@pytest.mark.full
def test_with_trust_the_recipe_builds_it(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    run = someones_run(tmp_path / "theirs", attacks(ran, tmp_path / "script.py")["our own loader of files"])
    sampled(f"source={run}", "trust=true", folder=tmp_path / "ours")
    assert ran.exists()
