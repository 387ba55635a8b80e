"""Find the checkpoint that a run resumes from. Imports no torch."""

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_cp.checkpoint import find_checkpoint, latest_checkpoint, parse_manifest
from lightning_cp.files import read_regular
from lightning_cp.recipes.runs import slurm, sweep
from lightning_cp.recipes.settings.table import SettingsError, read

AUTO = "auto"  # resume this command's newest checkpoint; start if there is none


def resumed_checkpoint(config: DictConfig, requeued: Path | None) -> str | None:
    """Return the absolute path of the checkpoint that the setting `resume` names; None to start anew.

    Args: requeued: checkpoint of this job from before SLURM restarted it, which comes first.
    Raises: SettingsError: the checkpoint has other settings. CheckpointError: there is none, or it is damaged.
    """
    resume = read(config, "resume")
    run_dir, root = Path(read(config, "run_dir")), Path(read(config, "output_root")).absolute()
    if requeued is None and resume is None:
        return None
    if root not in run_dir.absolute().parents:
        root = run_dir.parent  # hydra.run.dir was set: look for other runs in its parent folder
    folder = requeued or (_of_this_command(root, run_dir) if resume == AUTO else find_checkpoint(resume, root))
    if folder is None:
        return None
    manifest, max_steps = parse_manifest(folder), read(config, "max_steps")
    step, sampler = manifest.step, manifest.facts.get("sampler")
    batch_size = sampler.get("batch_size") if isinstance(sampler, dict) else None  # else damaged: refused when loaded
    for key, saved in (("seed", manifest.facts.get("seed")), ("batch_size", batch_size)):
        if saved is not None and saved != read(config, key):
            raise SettingsError(
                f"{key}={read(config, key)} differs from {key}={saved} of the checkpoint to resume, {folder}: "
                f"use {key}={saved}, because the order of the data depends on it"
            )
    if step > max_steps:
        raise SettingsError(
            f"max_steps={max_steps} must be at least {step}, the step of the checkpoint to resume ({folder})"
        )
    trace_step = read(config, "trace_step")
    if trace_step is not None and trace_step <= step and requeued is None and resume != AUTO:
        raise SettingsError(
            f"trace_step={trace_step} must be more than {step}, the step of the checkpoint to resume ({folder})"
        )
    return str(folder.absolute())


def requeued_checkpoint(config: DictConfig) -> Path | None:
    """Return the newest checkpoint of this job from before SLURM restarted it; None if SLURM did not."""
    root = Path(read(config, "output_root")).absolute()
    earlier = (latest_checkpoint(folder) for folder in slurm.earlier_runs(os.environ, root, identity_of(config)))
    return next((folder for folder in earlier if folder is not None), None)


def identity_of(config: DictConfig) -> str:
    """Return a hash of settings and job number, equal wherever the job runs: `resume` and `run_dir` are left out."""
    settings = OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("resume", "run_dir")])
    text = f"{sweep.job_number()} {OmegaConf.to_yaml(settings)}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _of_this_command(root: Path, run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint of this command under a folder; None if it has none.

    A run is of this command if it was started with the same settings on the command line, apart from `resume`, or if it
    has the same folder. So each job of a sweep finds its own checkpoints.
    """
    command = _command(HydraConfig.get().overrides.task) if HydraConfig.initialized() else None
    return latest_checkpoint(root, accept=partial(_is_of, command, run_dir.resolve()))


def _is_of(command: Sequence[str] | None, run_dir: Path, folder: Path) -> bool:
    if folder.resolve() == run_dir:
        return True
    try:
        overrides = yaml.safe_load(read_regular(folder / ".hydra" / "overrides.yaml", limit_bytes=1 << 20))
    except (OSError, ValueError, yaml.YAMLError):  # not a run of a recipe
        return False
    return isinstance(overrides, list) and _command(overrides) == command


def _command(overrides: Sequence[object]) -> list[str]:
    return [str(each) for each in overrides if str(each).lstrip("+").partition("=")[0] != "resume"]
