"""Replace `ring=auto` and `ulysses=auto` by degrees, before ranks start. Imports torch only if a run has them."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.launch.machine import Machine, describe_gpu
from lightning_cp.launch.rank import LauncherEnv
from lightning_cp.mesh.degrees import AUTO
from lightning_cp.recipes.runs import sweep
from lightning_cp.recipes.runs.resume import requeued_checkpoint, resumed_checkpoint
from lightning_cp.recipes.settings.table import SettingsError, read, show
from lightning_cp.recipes.settings.world import accelerator_of, is_single

_DEGREES = ("ring", "ulysses")


def with_degrees(config: DictConfig, machine: Machine, env: LauncherEnv | None) -> tuple[DictConfig, str | None]:
    """Choose the degrees that are "auto". Under a launcher each rank does so, with the same result.

    A resumed run keeps its degrees if they fit the number of ranks and the batch.

    Returns: the configuration with degrees, and the reason in one line, which is None without "auto".
    Raises: SettingsError: the number of ranks is not known, or the planner finds no degrees. CheckpointError: see
        `resumed_checkpoint`.
    """
    chosen = [name for name in _DEGREES if read(config, name) == AUTO]
    if not chosen:
        return config, None
    if is_single(config):
        return _replaced(config, dict.fromkeys(chosen, 1)), None
    text = " ".join(f"{name}=auto" for name in chosen)
    for key in ("shares", "degrees.by_tokens", "grid"):
        if read(config, key) is not None:
            raise SettingsError(f"{text} does not work with {key}={show(read(config, key))}: set ring and ulysses")
    ranks = _ranks(config, machine, env, text)
    degrees, reason = _kept(config, chosen, ranks), "those of the run that is resumed"
    if degrees is None and ranks == 1:
        degrees, reason = dict.fromkeys(_DEGREES, 1), "nothing to divide"
    if degrees is None:
        degrees, reason = _planned(config, machine, ranks, ranks if env is None else env.ranks_per_node, text)
    else:
        reason = f"{' '.join(f'{name}={degree}' for name, degree in degrees.items())}: {ranks} ranks; {reason}"
    return _replaced(config, degrees if env is not None else {**degrees, "devices": ranks}), reason


def _replaced(config: DictConfig, values: dict[str, int]) -> DictConfig:
    merged = OmegaConf.merge(config, values)
    assert isinstance(merged, DictConfig), "both are mappings"
    return merged


def _ranks(config: DictConfig, machine: Machine, env: LauncherEnv | None, text: str) -> int:
    devices = read(config, "devices")
    if env is not None:
        return env.world_size
    if devices != AUTO:
        return int(devices)
    if accelerator_of(config, machine) == "cpu":
        raise SettingsError(f"{text} needs the number of ranks: set devices, for example devices=2")
    return machine.gpus


def _kept(config: DictConfig, chosen: list[str], ranks: int) -> dict[str, int] | None:
    """Return the degrees of the run that is resumed; None if there is none, or they do not fit."""
    checkpoint = resumed_checkpoint(config, requeued_checkpoint(config))
    saved = None if checkpoint is None else Path(checkpoint).parents[1] / ".hydra" / sweep.RESOLVED
    if saved is None or not saved.is_file():
        return None
    earlier: Any = OmegaConf.load(saved)
    degrees = {name: read(earlier if name in chosen else config, name) for name in _DEGREES}
    if not all(isinstance(degree, int) and degree > 0 for degree in degrees.values()):
        return None
    data, rest = divmod(ranks, degrees["ring"] * degrees["ulysses"])
    fits = data and not rest and not read(config, "batch_size") % data
    return degrees if fits and read(config, "data_parallel") in (AUTO, data) else None


def _planned(
    config: DictConfig, machine: Machine, ranks: int, node_ranks: int, text: str
) -> tuple[dict[str, int], str]:
    from lightning_cp.recipes.training.planned import plan_training

    gpu = None
    if accelerator_of(config, machine) == "cuda":
        gpu = describe_gpu()
        if gpu is None:
            raise SettingsError(f"{text}: the name of the GPU cannot be read: set ring and ulysses")
    try:
        degrees = plan_training(config, ranks, node_ranks=node_ranks, gpu=gpu)
    except (ValueError, RuntimeError, OSError) as error:
        raise SettingsError(f"{text}: {error}") from error
    return {"ring": degrees.ring, "ulysses": degrees.ulysses}, degrees.reason
