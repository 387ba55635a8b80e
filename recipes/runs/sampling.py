"""Check the settings of `lightning-cp sample`, for a run from scratch or a diffusers pipeline.

Imports neither torch nor diffusers.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_cp.errors import MediaError
from lightning_cp.files import read_json, why_not_regular
from lightning_cp.launch.machine import Machine
from lightning_cp.launch.rank import LauncherEnv
from lightning_cp.pipeline_folder import is_hub_id
from lightning_cp.recipes.runs.recipe import CheckedRun, resolve_config
from lightning_cp.recipes.settings.components import check_heads, read_file
from lightning_cp.recipes.settings.consistency import check_device, check_trainer
from lightning_cp.recipes.settings.formats import check_format
from lightning_cp.recipes.settings.table import SettingsError, check_values, read, show
from lightning_cp.recipes.settings.trained import TrainedDenoiser, find_adapters, find_models, find_run
from lightning_cp.recipes.settings.world import is_single, resolve_world

_PIPELINE_FILES = ("model_index.json", "modular_model_index.json")
_BRANCHES = 2  # CFG branches of a run's model: conditional and unconditional
_PIPELINE_PRECISIONS = ("32-true", "bf16-true", "16-true")
_BY_CLASS = ("DiTPipeline", "ConsistencyModelPipeline")  # pipelines that take classes as prompts
# Settings that only pipelines use, with their defaults from conf/sample.yaml.
_PIPELINE_DEFAULTS: dict[str, Any] = {
    **{"transformer": None, "image": None, "negative_prompt": None, "call": {}, "shard": []},
    **{"vae": "auto", "stages": "together", "per_call": 1, "pipe": 1, "patches": 1, "warmup": 1, "graphs": False},
}


def check_sampling(config: DictConfig, machine: Machine, env: LauncherEnv | None) -> CheckedRun:
    """Check everything that can be checked before ranks start, and find the model to sample. See `check_config`.

    Raises: SettingsError: the first error found.
    """
    check_values(config)
    world = resolve_world(config, machine, env)
    check_device(config, world.accelerator)
    try:
        check_format(config.format)
    except MediaError as error:
        raise SettingsError(str(error)) from None
    source = {**_source(config), **find_adapters(config)}
    with_world: Any = OmegaConf.merge(config, OmegaConf.create(world.settings()))
    if not is_single(config):  # the strategy treats CFG branches and stages of blocks as data groups
        with_world.strategy.data_parallel = world.data_parallel * world.cfg * world.pipe
    resolved: Any = OmegaConf.merge(resolve_config(with_world), OmegaConf.create(source))
    check_trainer(resolved)
    if resolved.prompts == []:
        raise SettingsError("prompts=[] is not valid: give at least one prompt, or null for none")
    if resolved.trained is None:
        _check_pipeline(resolved)
    else:
        _check_trained(resolved)
    if not _is_file(resolved.prompts):
        resolved.prompts = _entries(resolved.prompts)
    return CheckedRun(resolved, world)


def _source(config: DictConfig) -> dict[str, Any]:
    """Find the source: `run` (its folder) and `trained` (a `TrainedDenoiser`), or `pipeline`; the others are None."""
    source = str(read(config, "source"))
    folder = Path(source)
    if any((folder / name).is_file() for name in _PIPELINE_FILES):
        return {"pipeline": str(folder.absolute()), "run": None, "trained": None}
    if source != "last" and not folder.exists():
        if is_hub_id(source):
            return {"pipeline": source, "run": None, "trained": None}  # id of a pipeline on the hub
        raise SettingsError(
            f"source={source} does not exist: must be `last` (the newest run under output_root), the folder of a run "
            "or of a pipeline, or the id of a pipeline on the hub (organisation/name)"
        )
    run = find_run(config)
    try:
        trained = TrainedDenoiser.read(run)
    except ValueError as error:
        raise SettingsError(f"source={source}: {error}") from None
    return {"pipeline": None, "run": str(run), "trained": asdict(trained)}


def _check_trained(config: DictConfig) -> None:
    transformer = Path(config.run) / "transformer"
    check_heads(read_file(transformer / "config.json", "source"), transformer, config.ulysses)
    if config.cfg > _BRANCHES:
        raise SettingsError(
            f"cfg={config.cfg} is not valid: must be at most {_BRANCHES}, the number of guidance branches"
        )
    for key, default in _PIPELINE_DEFAULTS.items():
        if config[key] != default:
            raise SettingsError(
                f"{key}={show(config[key])} applies to pipelines only: leave it out for a run ({config.run})"
            )
    classes, frames = config.trained.num_classes, config.trained.size[1]
    for value in _entries(config.prompts) or ():
        if not _is_class(value) or value >= classes:
            raise SettingsError(
                f"prompts={show(config.prompts)} is not valid: prompts of this run must be classes, from 0 to "
                f"{classes - 1}"
            )
    formats = ("auto", "png", "gif", "mp4") if frames == 1 else ("auto", "gif", "mp4")
    if config.format not in formats:
        kind = "pictures" if frames == 1 else f"clips of {frames} frames"
        raise SettingsError(
            f"format={config.format} is not valid: samples of this run are {kind}: must be one of {', '.join(formats)}"
        )


def _check_pipeline(config: DictConfig) -> None:
    if config.precision not in _PIPELINE_PRECISIONS:
        raise SettingsError(
            f"precision={config.precision} is not valid for a pipeline: must be one of "
            f"{', '.join(_PIPELINE_PRECISIONS)}"
        )
    index = _pipeline_index(config.pipeline)
    kind = index.get("_class_name")
    _check_prompts(config.prompts, kind if isinstance(kind, str) else None)  # a list: a pipeline class of one's own
    for file in Path(config.pipeline).glob("transformer*/config.json"):
        check_heads(read_file(file, "source"), file.parent, config.ulysses)
    config.transformer = find_models(config, index)
    if config.patches == 1 and config.warmup > 1:
        raise SettingsError(f"warmup={config.warmup} has no meaning with patches=1, which is exact: leave it out")
    image = config.call.get("image", config.image)
    if image is not None and not Path(image).is_file():
        raise SettingsError(f"image={image} {why_not_regular(image)}: must be the path of an image file")
    if image is not None and config.per_call > 1:
        raise SettingsError(f"per_call={config.per_call} is not valid with an image: must be 1")


def _check_prompts(value: Any, kind: str | None) -> None:
    """Check prompts. Args: kind: pipeline class, None if unknown. Raises: SettingsError: it does not take them."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise SettingsError(
            'prompts must be set for a pipeline: a text, a list ("prompts=[a cat,a dog]") or the path of a file'
        )
    if isinstance(value, str) and _looks_like_path(value) and not _is_file(value):
        raise SettingsError(
            f"prompts={value} looks like a path, but it {why_not_regular(value)}; for a text, use a list: "
            f"prompts=[{value}]"
        )
    takes_classes, takes_texts = kind is None or kind in _BY_CLASS, kind not in _BY_CLASS
    for entry in _entries(value) or ():
        if not (_is_class(entry) and takes_classes) and not (isinstance(entry, str) and takes_texts):
            valid = """texts (a number needs quotes: 'prompts=["7"]')""" if takes_texts else "classes, whole numbers"
            raise SettingsError(
                f"prompts={show(value)} is not valid: prompts of {kind or 'a pipeline'} must be {valid}"
            )


def _looks_like_path(text: str) -> bool:
    return text.endswith(".txt") or (os.sep in text and not any(letter.isspace() for letter in text))


def _is_class(entry: Any) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0


def _is_file(value: Any) -> bool:
    return isinstance(value, str) and os.path.isfile(value)


def _entries(value: Any) -> Sequence[Any] | None:
    """Return the prompts as a list; a single prompt becomes a list of one, None stays None."""
    return value if value is None or isinstance(value, ListConfig) else [value]


def _pipeline_index(source: str) -> dict[str, Any]:
    """Read a pipeline's model_index.json from its local folder; empty if there is no folder."""
    index = next((path for name in _PIPELINE_FILES if (path := Path(source) / name).is_file()), None)
    if index is None:
        return {}
    try:
        return read_json(index)
    except ValueError as error:
        raise SettingsError(f"source={source}: {error}") from error
