"""What the settings of `python recipes/sample.py` mean: a checkpoint of a run, or a pipeline of diffusers.

Imports neither torch nor diffusers.
"""

import importlib.util
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.checkpoint import CheckpointError, find_checkpoint
from lightning_cp.launch import sweep
from lightning_cp.launch.combined import check_device, check_model, check_trainer
from lightning_cp.launch.external import RankPlace
from lightning_cp.launch.machine import Machine
from lightning_cp.launch.recipe import CheckedRun, resolve
from lightning_cp.launch.settings import SettingsError, check_values, read, show
from lightning_cp.launch.world import is_single, resolve_world

_PIPELINE_FILES = ("model_index.json", "modular_model_index.json")
_BRANCHES = 2  # of a flow with guidance: with the class, and without
_WHOLE_PRECISIONS = ("32-true", "bf16-true", "16-true")


def check_sampling(config: DictConfig, machine: Machine, place: RankPlace | None) -> CheckedRun:
    """Checks all that can be known before ranks start; finds out what is sampled. See `check_config`.

    Raises: SettingsError, CheckpointError: the first thing that is wrong.
    """
    check_values(config)
    world = resolve_world(config, machine, place)
    check_device(config, world.accelerator)
    if config.format == "mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise SettingsError("format=mp4 needs imageio and ffmpeg: pip install 'imageio[ffmpeg]', or use format=gif")
    found = _source(config)
    settled: Any = OmegaConf.merge(config, OmegaConf.create(world.settings()))
    if not is_single(config):  # to a strategy, the branches of guidance are data groups
        settled.strategy.data_parallel = world.data_parallel * world.cfg
    resolved: Any = OmegaConf.merge(resolve(settled), OmegaConf.create(found))
    check_trainer(resolved)
    if resolved.trained is None:
        _check_pipeline(resolved)
    else:
        _check_trained(resolved)
    return CheckedRun(resolved, world)


def _source(config: DictConfig) -> dict[str, Any]:
    """`checkpoint` and `trained` (the configuration of its run), or `pipeline`; None for what it is not."""
    source, root = str(read(config, "source")), Path(read(config, "output_root")).absolute()
    folder = Path(source)
    if any((folder / name).is_file() for name in _PIPELINE_FILES):
        return {"pipeline": str(folder.absolute()), "checkpoint": None, "trained": None}
    if source != "last" and not folder.exists():
        if source.count("/") == 1 and not source.startswith((".", "/", "~")):
            return {"pipeline": source, "checkpoint": None, "trained": None}  # of a hub
        raise SettingsError(
            f"source={source} does not exist: must be `last` (the newest checkpoint under output_root), the folder of "
            "a checkpoint, of a run or of a pipeline, or the id of a pipeline on the hub (organisation/name)"
        )
    try:
        checkpoint = find_checkpoint(source, root).absolute()
    except CheckpointError as error:
        raise SettingsError(str(error).replace("resume=", "source=", 1)) from error
    settings = checkpoint.parent.parent / ".hydra" / sweep.RESOLVED
    if not settings.is_file():
        raise SettingsError(f"source={source}: {settings} is not there, which says what model {checkpoint} is of")
    return {"pipeline": None, "checkpoint": str(checkpoint), "trained": OmegaConf.load(settings)}


def _check_trained(config: DictConfig) -> None:
    trained = config.trained
    degrees = {"ring": config.ring, "ulysses": config.ulysses}
    check_model(OmegaConf.merge(trained, degrees))  # type: ignore[arg-type]
    if config.cfg > _BRANCHES:
        raise SettingsError(f"cfg={config.cfg} is not valid: a run's model has {_BRANCHES} branches of guidance")
    classes = trained.data.num_classes
    for asked in config.prompts or ():
        if isinstance(asked, bool) or not isinstance(asked, int) or not 0 <= asked < classes:
            raise SettingsError(
                f"prompts={show(config.prompts)}: of this run they are classes, from 0 to {classes - 1}"
            )
    for key in ("image", "negative_prompt"):
        if config[key] is not None:
            raise SettingsError(f"{key}={config[key]} is for pipelines; {config.checkpoint} is a checkpoint of a run")
    if config.call or config.shard:
        raise SettingsError(f"call and shard are for pipelines; {config.checkpoint} is a checkpoint of a run")


def _check_pipeline(config: DictConfig) -> None:
    if config.precision not in _WHOLE_PRECISIONS:
        raise SettingsError(f"precision={config.precision} is not valid for a pipeline: {', '.join(_WHOLE_PRECISIONS)}")
    if not config.prompts:
        raise SettingsError('prompts must be given for a pipeline: a text, a list ("prompts=[a cat,a dog]"), or a file')
    if config.image is not None and not Path(config.image).is_file():
        raise SettingsError(f"image={config.image} is no file")
