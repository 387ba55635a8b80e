"""Check the settings of `lightning-cp precompute`.

Imports neither torch nor diffusers.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.finetune.settings import PrecomputeSettings
from lightning_cp.launch.machine import Machine
from lightning_cp.launch.rank import LauncherEnv, is_first
from lightning_cp.recipes.runs.recipe import CheckedRun, resolve_config
from lightning_cp.recipes.runs.run_folder import check_writable
from lightning_cp.recipes.settings.components import check_pretrained
from lightning_cp.recipes.settings.data_folders import data_folders
from lightning_cp.recipes.settings.table import Setting, SettingsError, check_values, read
from lightning_cp.recipes.settings.world import resolve_world
from lightning_cp.rules import rules_of

_SETTINGS = tuple(
    Setting("data.captions" if name == "captions" else f"precompute.{name}", rule)
    for name, rule in rules_of(PrecomputeSettings).items()
    if name != "workers"
)


def check_precompute(config: DictConfig, machine: Machine, env: LauncherEnv | None) -> CheckedRun:
    """Check everything that can be checked before ranks start. See `check_config`.

    Raises: SettingsError: the first error found.
    """
    for key, example in (("model.pretrained", "my-pipeline"), ("data.path", "clips")):
        group, name = key.split(".")
        if OmegaConf.is_missing(config[group], name):
            raise SettingsError(f"{key} must be given, for example {key}={example}")
    check_values(config)
    for setting in _SETTINGS:
        setting.check(config)
    values: Any = OmegaConf.to_container(config.precompute, resolve=True)
    try:
        PrecomputeSettings(captions=read(config, "data.captions"), **values)
    except ValueError as error:
        raise SettingsError(f"precompute.{error}") from None
    folders, output = data_folders(config), Path(str(read(config, "output"))).absolute()
    _check_output([Path(folder["path"]) for folder in folders], output)
    vae_ranks, devices = read(config, "precompute.vae_ranks"), _devices(config, machine, env)
    degrees = {"strategy": {"_target_": ""}, "ring": vae_ranks, "ulysses": 1, "data_parallel": "auto"}
    machine_settings = {name: read(config, name) for name in ("accelerator", "num_nodes")}
    world = resolve_world(OmegaConf.create({**degrees, **machine_settings, "devices": devices}), machine, env)
    settled = {name: value for name, value in world.settings().items() if name != "data_parallel"}
    if (source := Path(str(read(config, "model.pretrained")))).is_dir():
        settled["model"] = {"pretrained": str(source.absolute())}
    else:
        check_pretrained(config)
    settled["output"] = str(output)
    config = config.copy()
    OmegaConf.update(config, "data.path", folders, merge=False)  # a folder's settings become a list of them
    if is_first(env):
        check_writable(output, "output")
    return CheckedRun(resolve_config(OmegaConf.merge(config, settled)), world)


def _devices(config: DictConfig, machine: Machine, env: LauncherEnv | None) -> int | str:
    vae_ranks, devices = read(config, "precompute.vae_ranks"), read(config, "devices")
    if devices == "auto" and env is None:
        devices = machine.gpus if read(config, "accelerator") != "cpu" else 0
        devices = devices // vae_ranks * vae_ranks or vae_ranks
    number, source = (
        (devices, f"devices={devices}") if env is None else (env.world_size, f"the ranks of {env.launcher}")
    )
    if number % vae_ranks:
        raise SettingsError(f"precompute.vae_ranks={vae_ranks} must divide {source}")
    ranks: int | str = devices
    return ranks


def _check_output(paths: Sequence[Path], output: Path) -> None:
    for path in paths:
        if path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            raise SettingsError(
                f"output={output} is not valid: it must not lie in data.path={path}, because the next run would train "
                "on the contact sheet"
            )
    others = sorted(name for name in os.listdir(output) if name[0] != ".") if output.is_dir() else []
    if others and "index.json" not in others:
        raise SettingsError(
            f"output={output} holds other files ({others[0][:80]}, …) and is no latent cache: use an empty folder"
        )
