"""Load a pipeline that only encodes: without its transformers' weights, and with its encoders on a device in turn."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import FamilyError
from lightning_cp.files import read_json
from lightning_cp.finetune.families.registry import family_class
from lightning_cp.finetune.modular import class_with_call, is_modular
from lightning_cp.finetune.pipeline import load_pipeline
from lightning_cp.pipeline_folder import find_pipeline, read_index
from lightning_cp.pipelines.components import build_component

_SETTING = "model.pretrained"  # holds the source
_CODE = "contains Python code, which is not run: use a pipeline with classes from diffusers and transformers only"


@dataclass(frozen=True)
class ConfigOnly:
    """Replacement for a transformer that is not loaded. Families and pipelines read its config."""

    config: Any
    dtype: torch.dtype


def load_encoders(
    source: str, dtype: torch.dtype, *, vae_dtype: torch.dtype | None = None, weights: bool = True
) -> Any:
    """Load a pipeline from a folder or from the Hub; its transformers are `ConfigOnly`.

    Args:
        vae_dtype: dtype of the VAEs; None: `dtype`.
        weights: False: read no weights. The pipeline then has its sizes, but cannot encode, and what its family reads
            from weights (`latents_mean` of FLUX.2) has no meaning.
    Raises: ValueError: it cannot be loaded. FamilyError: no family is registered for its class, or a component that
        encodes is missing.
    """
    index = _index(source)
    kind = _class(source, index)
    components = family_class(kind).components
    needed = [name for name in (*components.text, *components.media) if name not in components.optional]
    _check_components(source, index, kind, needed)
    models = {name: _transformer(source, name, index[name]) for name in components.models if _is_there(index, name)}
    if not models:
        raise FamilyError(f"{_SETTING}={source} has no transformer: it must have one of {', '.join(components.train)}")
    dtypes = {"default": dtype, **{name: vae_dtype or dtype for name in components.media if name.endswith("vae")}}
    built = {} if weights else _built(source, index.keys() - models.keys(), index, components.media)
    pipe = load_pipeline(source, dtypes, setting=_SETTING, components={**built, **models})
    for name, model in models.items():
        setattr(pipe, name, ConfigOnly(model.config, dtype))
    return pipe


def _built(source: str, names: Collection[str], index: dict[str, Any], media: Collection[str]) -> dict[str, nn.Module]:
    """Build components of a pipeline from their configs, those of `media` with values, which have no meaning."""
    folder, built = find_pipeline(source, "*/config.json", setting=_SETTING), dict[str, nn.Module]()
    for name in names:
        if _is_there(index, name) and (folder / name / "config.json").is_file():
            with suppress(Exception):  # of a damaged config: `load_pipeline` then loads the component, and reports it
                library, class_name = index[name]
                module = build_component(class_name, read_json(folder / name / "config.json"), library)
                if module is not None:
                    built[name] = module.to_empty(device="cpu") if name in media else module
    return built


def pipeline_class(source: str) -> type:
    """Return the class of a pipeline in a folder or on the Hub, see `load_pipeline` for modular ones.

    Raises: ValueError: there is no pipeline, or its class is not one of diffusers.
    """
    return _class(source, _index(source))


def _index(source: str) -> dict[str, Any]:
    folder = find_pipeline(source, setting=_SETTING)
    try:
        index = read_index(folder)
    except ValueError as error:
        raise ValueError(f"{_SETTING}={source} cannot be loaded: {error}") from None
    if not index.get("_class_name"):
        raise ValueError(f"{_SETTING}={source}: its model_index.json names no pipeline class")
    return index


def _class(source: str, index: dict[str, Any]) -> type:
    import diffusers

    name = index["_class_name"]
    if not isinstance(name, str):
        raise ValueError(f"{_SETTING}={source} {_CODE}: its pipeline class is {name}")
    kind: Any = getattr(diffusers, name, None)
    if not isinstance(kind, type):
        raise ValueError(f"{_SETTING}={source}: diffusers {diffusers.__version__} has no {name}")
    return class_with_call(kind) if is_modular(kind) else kind


def _check_components(source: str, index: dict[str, Any], kind: type, encoding: Sequence[str]) -> None:
    """Raise FamilyError if a component that encodes is missing, and ValueError if a component's folder is missing."""
    arguments: Mapping[str, inspect.Parameter] = inspect.signature(kind).parameters
    if is_modular(kind):
        arguments = {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in encoding}
    needed = [x for x in encoding if x in arguments and arguments[x].default is inspect.Parameter.empty]
    missing = [name for name in needed if not _is_there(index, name)]
    if missing:
        raise FamilyError(f"{_SETTING}={source} has no {' and no '.join(missing)}, which encode the data")
    present = [name for name in arguments if _is_there(index, name)]
    folders = [name for name in present if Path(source).is_dir() and not (Path(source) / name).is_dir()]
    if folders:
        raise ValueError(f"{_SETTING}={source} cannot be loaded: the folder {folders[0]} is missing in it")


def _is_there(index: dict[str, Any], name: str) -> bool:
    entry = index.get(name)
    return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None


def _transformer(source: str, name: str, entry: Sequence[str]) -> Any:
    """Build a transformer on the meta device: pipelines read their default sizes from its config when they are made."""
    import diffusers

    library, class_name = entry
    if library != "diffusers":
        raise ValueError(f"{_SETTING}={source} {_CODE}: its {name} is {library}.{class_name}")
    kind = getattr(diffusers, class_name, None)
    if kind is None or not hasattr(kind, "load_config"):  # unknown, or several ControlNets in one module
        raise FamilyError(
            f"{name} of {source} is a {class_name}, which is not a single model of diffusers {diffusers.__version__}"
        )
    try:
        config = kind.load_config(source, subfolder=name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{_SETTING}={source} cannot be loaded: {' '.join(str(error).split())}") from None
    with torch.device("meta"):
        return kind.from_config(config)


@contextmanager
def components_on(pipe: Any, names: Sequence[str], device: torch.device) -> Iterator[None]:
    """Within this context, put some components on a device and take all other modules out of the pipeline.

    A pipeline computes on the device of its first module, so modules that stay in host memory must not be found.
    """
    modules = {name: x for name, x in pipe.components.items() if isinstance(x, nn.Module)}
    try:
        for name, module in modules.items():
            if name in names:
                module.to(device)
            else:
                setattr(pipe, name, None)
        yield
    finally:
        for name, module in modules.items():
            setattr(pipe, name, module.to("cpu"))


def release(pipe: Any, names: Sequence[str]) -> None:
    """Free components: they are None afterwards."""
    for name in names:
        setattr(pipe, name, None)
    gc.collect()
