"""Read the settings of lightning-cp plan: the model, the device and the request."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf

from lightning_cp.files import read_json
from lightning_cp.launch.rank import load_target
from lightning_cp.pipeline_folder import index_file, read_index
from lightning_cp.recipes.settings.table import Setting, SettingsError
from lightning_cp.rules import Integer, OneOf

if TYPE_CHECKING:
    from lightning_cp.planning.devices import Device
    from lightning_cp.planning.models import Entries, MediaSize, PlannedModel
    from lightning_cp.planning.search import Request

_PRECISIONS = {"bf16-true": ("bfloat16", None), "bf16-mixed": ("float32", "bfloat16"), "32-true": ("float32", None)}
_SETTINGS = (
    Setting("rows", Integer(1)),
    Setting("batch_size", Integer(1)),
    Setting("precision", OneOf(("auto", *_PRECISIONS))),
    Setting("guidance", OneOf(("auto", True, False))),
)


def request_of(config: DictConfig) -> Request:
    """Return what the settings ask for. Raises: ValueError: a setting is invalid, or contradicts another one."""
    import torch

    from lightning_cp.finetune.adapters.lora import add_lora
    from lightning_cp.finetune.settings import LoraSettings
    from lightning_cp.pipelines.placement.sharding import is_vae
    from lightning_cp.planning.devices import GB
    from lightning_cp.planning.models import components_of, compression
    from lightning_cp.planning.search import Request

    if OmegaConf.is_missing(config, "model"):
        raise SettingsError("model=<name> must be set, see --help")
    for setting in _SETTINGS:
        setting.check(config)
    device = device_of(config.gpu)
    precision = config.precision
    if precision == "auto":
        precision = "32-true" if device.kind == "cpu" else "bf16-true"
    dtype, autocast = _PRECISIONS[precision]
    plan = None if config.plan is None else load_target(f"{config.plan}:plan")
    modules, uncounted = components_of(_components(config))
    vae = next((x for x in modules.values() if is_vae(x)), None)
    size = getattr(torch, dtype).itemsize
    weights = {name: size * sum(x.numel() for x in module.parameters()) / GB for name, module in modules.items()}
    counts = config.task == "sample" and config.components
    return Request(
        model_of(config, None if vae is None else compression(vae)),
        config.ranks,
        device,
        task=config.task,
        memory_gb=config.memory_gb,
        reserved_gb=config.reserved_gb,
        others=weights if counts else {},
        uncounted=tuple(uncounted if counts else modules),
        adapt=None if config.lora.rank is None else partial(add_lora, settings=LoraSettings(rank=config.lora.rank)),
        dtype=getattr(torch, dtype),
        autocast=None if autocast is None else getattr(torch, autocast),
        batch_size=config.batch_size,
        plan=plan,
        fixed={key: value for key, value in _plain(config.fixed).items() if value is not None},
        mlp_tiles=config.mlp_tiles,
    )


def model_of(config: DictConfig, compression: tuple[int, int] | None) -> PlannedModel:
    """Return the model and its inputs. Raises: ValueError: it is not known, or a size does not fit it."""
    from lightning_cp.planning.models import PlannedModel, diffusers_model

    name, path = str(config.model), Path(str(config.model))
    if name.endswith(".py"):
        if not path.is_file():
            raise SettingsError(f"model={name} does not exist: must be a Python file with model() and inputs()")
        build, inputs = (cast("Any", load_target(f"{name}:{key}")) for key in ("model", "inputs"))
        return PlannedModel(path.stem, build, inputs(), guided=config.guidance is True)
    values: dict[str, Any] = {"class": name, "config": {}, "size": {}}
    if name in config.models:
        values = _plain(config.models[name])
    elif path.is_dir():
        values = {**values, **_read_folder(path)}
    elif "/" in name:
        raise SettingsError(
            f"model={name} is no folder: nothing is downloaded; use a local folder, or the model's class"
        )
    guided = None if config.guidance == "auto" else config.guidance
    model_config = {**values["config"], **_changed_entries(config, values["class"])}
    return diffusers_model(
        values["class"],
        model_config,
        _size(config, values["size"]),
        name=name,
        guided=guided,
        compression=compression,
        time_per_token=values.get("time_per_token", False),
    )


def _size(config: DictConfig, usual: Mapping[str, int]) -> MediaSize:
    """Return the size of a sample. Raises: ValueError: a setting is invalid."""
    from lightning_cp.planning.models import MediaSize

    size = {"height": 1024, "width": 1024, **usual}
    size |= {key: config[key] for key in ("height", "width", "frames", "text") if config[key] is not None}
    return MediaSize(**size, batch=config.batch_size)


def _components(config: DictConfig) -> Entries:
    """Return class and configuration of the other components of the model's pipeline, by name; {}: not known."""
    import transformers

    from lightning_cp.planning.models import read_components

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # image processors are not used
    name, path = str(config.model), Path(str(config.model))
    if name in config.models:
        components = _plain(config.models[name]).get("components", {})
        return {key: (x["class"], x["config"]) for key, x in components.items()}
    return read_components(path) if path.is_dir() and index_file(path) is not None else {}


def _changed_entries(config: DictConfig, kind: str) -> dict[str, Any]:
    """Return the entries of the model's configuration that a user sets. Raises: SettingsError: it has no such entry."""
    import diffusers

    changed: dict[str, Any] = _plain(config.config)
    built = getattr(diffusers, kind, None)
    known = inspect.signature(built.__init__).parameters if built is not None else changed
    for entry in changed:
        if entry not in known:
            close = ", ".join(difflib.get_close_matches(entry, known) or [x for x in known if x != "self"])
            raise SettingsError(f"config.{entry}: {kind} has no such entry, use {close}")
    return changed


def _read_folder(path: Path) -> dict[str, Any]:
    """Read the class and the configuration of a pipeline's transformer, or of a transformer."""
    files = [path / "transformer" / "config.json", path / "config.json"]
    file = next((x for x in files if x.is_file()), None)
    if file is None:
        raise SettingsError(f"model={path} has neither transformer/config.json nor config.json")
    config = read_json(file)
    if "_class_name" not in config:
        raise SettingsError(f"{file} has no _class_name: it is no configuration of a diffusers model")
    index = {} if index_file(path) is None else read_index(path)
    return {
        "class": config["_class_name"],
        "config": {k: v for k, v in config.items() if not k.startswith("_")},
        "time_per_token": bool(index.get("expand_timesteps")),
    }


def device_of(setting: Any) -> Device:
    """Return the device of the setting `gpu`. Raises: ValueError: it is not known, or a figure is invalid."""
    from lightning_cp.planning.devices import device_named

    figures = _plain(setting) if OmegaConf.is_dict(setting) else {"name": setting}
    name = str(figures.pop("name", "auto"))
    if name.endswith((".yaml", ".yml")):
        given = {key: value for key, value in figures.items() if value is not None}
        stored = {**_stored_figures(Path(name)), **given}
        try:
            return device_named(str(stored.pop("name", name)), {"source": "file", **stored})
        except ValueError as error:
            raise SettingsError(f"gpu={name} does not describe a device: {error}") from error
    if name != "auto":
        return device_named(name, figures)
    name, own_gb = _this_device()
    device = device_named(name, figures)
    if own_gb is None or figures.get("memory_gb") is not None:
        return device
    return replace(device, memory_gb=own_gb)  # some GPUs are sold with less than the table says


def _stored_figures(file: Path) -> dict[str, Any]:
    """Read the figures of a device. Raises: SettingsError: the file cannot be read, or has none."""
    from lightning_cp.planning.devices import DEVICES, NEEDED

    advice = f"It must hold {', '.join(NEEDED)}, as the device.yaml that lightning-cp plan calibrate=true writes"
    try:
        stored = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"gpu={file} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"gpu={file} cannot be read: it is not YAML. {advice}") from error
    if not isinstance(stored, dict):
        kind = "it is empty" if stored is None else f"it holds a {type(stored).__name__}, not names with values"
        raise SettingsError(f"gpu={file} does not describe a device: {kind}. {advice}")
    missing = [key for key in NEEDED if stored.get(key) is None]
    if missing and stored.get("name") not in DEVICES:
        keys = ", ".join(str(key) for key in list(stored)[:5])
        raise SettingsError(f"gpu={file} does not describe a device: no {', '.join(missing)} (it has {keys}). {advice}")
    return {str(key): value for key, value in stored.items()}


def _this_device() -> tuple[str, float | None]:
    """Return the name of this machine's device, that of the table or PyTorch's, and a GPU's memory in GB."""
    import torch

    from lightning_cp.planning.devices import GB, name_in_table

    if not torch.cuda.is_available():
        return "cpu", None
    gpu = torch.cuda.get_device_properties(0)
    return name_in_table(gpu.name) or gpu.name.lower().replace(" ", ""), gpu.total_memory / GB


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
