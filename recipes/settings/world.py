"""Determine the world of a run: number of ranks, accelerator, nodes and launcher."""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from lightning_cp.launch.machine import Machine
from lightning_cp.launch.rank import LauncherEnv
from lightning_cp.mesh.degrees import AUTO, check_shares
from lightning_cp.recipes.settings.table import SettingsError, read


@dataclass(frozen=True)
class World:
    """Ranks = data_parallel × cfg × pipe × ring × ulysses, on `num_nodes` nodes of `devices` ranks each."""

    data_parallel: int
    ring: int
    ulysses: int
    accelerator: str
    devices: int
    num_nodes: int
    cfg: int = 1
    pipe: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data_parallel * self.cfg * self.pipe * self.ring * self.ulysses

    def settings(self) -> dict[str, Any]:
        """Return the values that replace "auto" in the configuration, by key."""
        return {
            "data_parallel": self.data_parallel,
            "accelerator": self.accelerator,
            "devices": self.devices,
            "num_nodes": self.num_nodes,
        }


def resolve_world(config: DictConfig, machine: Machine, env: LauncherEnv | None) -> World:
    """Compute the world from the settings.

    Args:
        config: configuration that has passed `check_values`.
        machine: this machine.
        env: rank and world size from torchrun, SLURM or another launcher; None if the ranks are started here.
    Raises: SettingsError: the settings contradict each other, the machine, or the launcher.
    """
    check_single(config, env)
    accelerator = accelerator_of(config, machine)
    ring, ulysses, cfg = read(config, "ring"), read(config, "ulysses"), read(config, "cfg", 1)
    if AUTO in (ring, ulysses):
        raise SettingsError("ring=auto and ulysses=auto are for lightning-cp train: set the degrees")
    try:
        check_shares(read(config, "shares"), ring=ring, ulysses=ulysses)
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from None
    pipe = read(config, "pipe", 1)
    group = ring * ulysses * cfg * pipe
    devices, num_nodes = _int_or_none(read(config, "devices")), _int_or_none(read(config, "num_nodes"))
    if env is not None:
        available: int | None = env.world_size
        source = f"the {env.world_size} ranks that {env.launcher} started"
        num_nodes = num_nodes or env.world_size // env.ranks_per_node
    else:
        if num_nodes not in (None, 1):
            raise SettingsError(
                f"num_nodes={num_nodes} needs a launcher such as torchrun or SLURM: without one, it must be 1"
            )
        num_nodes = 1
        available = devices
        source = f"devices={devices}"
    data_parallel = _data_parallel(config, group, available, source)
    size = group * data_parallel
    world = World(data_parallel, ring, ulysses, accelerator, size // num_nodes, num_nodes, cfg, pipe)
    if devices is not None and devices != world.devices:
        raise SettingsError(
            f"devices={devices} is not valid: num_nodes={num_nodes} × devices must equal the number of ranks, {size}"
        )
    _check_devices(world, machine)
    return world


def check_single(config: DictConfig, env: LauncherEnv | None) -> None:
    """Check `strategy=single`. Raises: SettingsError: it is used with more than one rank."""
    if not is_single(config):
        return
    for key in ("ring", "ulysses", "cfg", "pipe", "data_parallel", "devices", "num_nodes"):
        value = read(config, key, 1)
        if value not in (1, "auto"):
            raise SettingsError(f"strategy=single is one process, so {key}={value} must be 1; or use strategy=cp")
    if env is not None and env.world_size > 1:
        raise SettingsError(
            f"strategy=single is one process, but {env.launcher} started {env.world_size}; use strategy=cp"
        )


def is_single(config: DictConfig) -> bool:
    """Return True if the strategy is Lightning's single-device strategy (`strategy=single`)."""
    strategy = read(config, "strategy")
    return isinstance(strategy, str) or read(config, "strategy._target_") == "builtins.str"


def shards_weights(config: DictConfig) -> bool:
    """Return whether the strategy shards weights and gradients: no rank then holds the whole model."""
    return str(read(config, "strategy._target_", "")).endswith("ContextParallelFSDPStrategy")


def _data_parallel(config: DictConfig, group: int, available: int | None, source: str) -> int:
    value = read(config, "data_parallel")
    degrees = f"ring={read(config, 'ring')} × ulysses={read(config, 'ulysses')}"
    for key in ("cfg", "pipe"):
        degrees += f" × {key}={read(config, key)}" if read(config, key, 1) > 1 else ""
    if value == "auto":
        if available is None:
            return 1
        if available % group:
            raise SettingsError(f"{degrees} = {group} must divide {source}")
        return available // group
    if available is not None and value * group != available:
        raise SettingsError(f"data_parallel={value} × {degrees} = {value * group} must equal {source}")
    return int(value)


def accelerator_of(config: DictConfig, machine: Machine) -> str:
    """Return "cuda" or "cpu". Raises: SettingsError: the setting needs a GPU, and there is none."""
    value = read(config, "accelerator")
    if value == "cpu":
        return "cpu"
    if machine.gpus:
        return "cuda"
    if value == "auto":
        return "cpu"
    raise SettingsError(f"accelerator={value} is not valid: torch finds no CUDA device here; use cpu or auto")


def _check_devices(world: World, machine: Machine) -> None:
    branches = f" × cfg={world.cfg}" if world.cfg > 1 else ""
    branches += f" × pipe={world.pipe}" if world.pipe > 1 else ""
    degrees = f"ring={world.ring} × ulysses={world.ulysses}{branches} × data_parallel={world.data_parallel}"
    layout = f"{degrees} = {world.size} ranks"
    if world.accelerator == "cuda" and world.devices > machine.gpus:
        raise SettingsError(
            f"{layout} need a GPU each: there are {machine.gpus} GPUs here; use fewer ranks, or accelerator=cpu"
        )
    if world.accelerator == "cpu" and world.devices > machine.max_cpu_ranks:
        raise SettingsError(
            f"{layout} are too many for {machine.cores} CPU cores: must be at most {machine.max_cpu_ranks} here"
        )


def _int_or_none(value: int | str) -> int | None:
    return value if isinstance(value, int) else None
