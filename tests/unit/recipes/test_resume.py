"""Checkpoints that `resume` finds."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_cp.checkpoint import manifest
from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint
from lightning_cp.launch import Machine
from lightning_cp.launch.job import Job, Result
from lightning_cp.recipes.runs import recipe
from lightning_cp.recipes.runs.recipe import check_config

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
    assert [call.args[0] for call in read.call_args_list] == [next(newest.glob("shard-*"))]


class _NoRanks:
    """Starts no ranks."""

    def launch(self, _: Job) -> Result:
        return Result(None)


@pytest.mark.parametrize(
    ("job", "resume", "restarted"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, "null", True),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, "last", True),
        ({"SLURM_JOB_ID": "7"}, "last", False),
        ({"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, "last", False),  # restarted before its first checkpoint
        ({}, "last", False),
    ],
)
@pytest.mark.default(1)
def test_only_a_job_that_slurm_has_restarted_says_so(
    job: dict[str, str],
    resume: str,
    restarted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recipe, "LocalLauncher", _NoRanks)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for folder, environment, resumed in (("first", {"SLURM_JOB_ID": "7"}, "null"), ("second", job, resume)):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings = [f"output_root={tmp_path}", f"run_dir={tmp_path / folder}", f"resume={resumed}", "seed=0"]
        with initialize_config_dir(CONF, version_base="1.3"):
            config = compose("train", overrides=settings)
        result = recipe.attempt(config, None, target="none")
        assert result.failure is None, result.failure
        if folder == "first":
            states = {"model": {"weight": torch.zeros(3)}}
            newest = save_checkpoint(tmp_path / folder / "checkpoints", Checkpoint(1, states, {"seed": 0}))
            monkeypatch.delenv("SLURM_JOB_ID")
    assert OmegaConf.load(tmp_path / "second" / ".hydra" / "resolved.yaml").resume == str(newest)
    assert (f"SLURM restarted this job: it resumes from {newest}" in capsys.readouterr().out) == restarted


def test_overrides_are_saved_in_run_dir_where_it_is_not_the_folder_of_hydra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "LocalLauncher", _NoRanks)
    given = [f"output_root={tmp_path}", f"run_dir={tmp_path / 'a'}", "seed=0", "resume=auto"]
    with initialize_config_dir(CONF, version_base="1.3"):
        config = compose("train", overrides=[*given, f"hydra.runtime.output_dir={tmp_path}"], return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.masked_copy(config, "hydra"))
    settings = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    assert recipe.attempt(settings, None, target="none").failure is None
    saved = {name: OmegaConf.load(tmp_path / "a" / ".hydra" / f"{name}.yaml") for name in ("config", "overrides")}
    assert saved["overrides"] == given
    assert saved["config"] == settings
    assert not (tmp_path / ".hydra").exists()


def test_auto_finds_the_checkpoints_of_its_own_command_only(tmp_path: Path) -> None:
    def started_with(run: str, *overrides: str) -> Path:
        hydra = tmp_path / run / ".hydra"
        hydra.mkdir(parents=True)
        OmegaConf.save(list(overrides), hydra / "overrides.yaml")
        return tmp_path / run / "checkpoints"

    def found(*overrides: str, run: str = "new") -> str:
        given = [*overrides, f"output_root={tmp_path}", f"run_dir={tmp_path / run}"]
        with initialize_config_dir(CONF, version_base="1.3"):
            config = compose("train", overrides=given)
        with mock.patch("lightning_cp.recipes.runs.resume.HydraConfig") as hydra:
            hydra.get().overrides.task = list(overrides)
            return str(check_config(config, Machine(cores=2), None).config.resume)

    mine, other = ("seed=0", "log_every=2"), ("seed=0", "log_every=3")
    assert found(*mine, "resume=auto") == "None"
    folder = started_with("a", "seed=0", "resume=auto", "log_every=2")
    assert found(*mine, "resume=auto") == "None"
    first = save_checkpoint(folder, Checkpoint(3, {}, {"seed": 0}))
    newest = save_checkpoint(started_with("b", *other), Checkpoint(9, {}, {"seed": 0}))
    assert found(*mine, "resume=auto") == str(first)
    assert found(*mine, "resume=auto", "trace_step=2") == "None"  # another command
    assert found(*other, "resume=auto") == found(*mine, "resume=last") == str(newest)
    assert found(*mine, "optim.lr=0.1", "resume=auto", run="b") == str(newest)  # the folder of this run
    started_with("c", *mine, "trace_step=2")
    save_checkpoint(tmp_path / "c" / "checkpoints", Checkpoint(4, {}, {"seed": 0}))
    assert found(*mine, "trace_step=2", "resume=auto") == str(tmp_path / "c" / "checkpoints" / "step_00000004")
    (tmp_path / "a" / ".hydra" / "overrides.yaml").write_text("[", encoding="utf-8")
    assert found(*mine, "resume=auto") == "None"
