"""Load a pipeline that only encodes: without its transformers' weights, and with its encoders on a device in turn."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import FamilyError
from lightning_cp.families.registry import family_class
from lightning_cp.pipelines.components import load_pipeline


@dataclass(frozen=True)
class ConfigOnly:
    """Stands in for a transformer whose weights are not loaded: families and pipelines read its config."""

    config: Any
    dtype: torch.dtype


def load_encoders(
    source: str, dtype: torch.dtype, *, vae_dtype: torch.dtype | None = None, setting: str = "model.pretrained"
) -> Any:
    """Load a pipeline from a folder or from the Hub; its transformers are `ConfigOnly`.

    Args:
        vae_dtype: dtype of the VAE; None: `dtype`.
        setting: name of the setting that holds `source`, for error messages.
    Raises: ValueError: it cannot be loaded. FamilyError: no family is registered for its class, or a component that
        encodes is missing.
    """
    import diffusers

    try:
        index = diffusers.DiffusionPipeline.load_config(source)
    except OSError as error:
        raise ValueError(f"{setting}={source} cannot be loaded: {' '.join(str(error).split())}") from None
    kind = getattr(diffusers, str(index.get("_class_name")), None)
    if kind is None:
        raise ValueError(f"{setting}={source}: diffusers {diffusers.__version__} has no {index.get('_class_name')}")
    components = family_class(kind).components
    configs = {
        name: _config_of(source, name, index[name][1], dtype) for name in components.train if _is_there(index, name)
    }
    if not configs:
        raise FamilyError(f"{setting}={source} has no transformer: it must have one of {', '.join(components.train)}")
    dtypes = {"default": dtype, "vae": vae_dtype or dtype}
    pipe = load_pipeline(source, dtypes, setting=setting, without=list(configs))
    for name, config in configs.items():
        setattr(pipe, name, config)
    for names in (components.text, components.media[:1]):
        if names and all(getattr(pipe, name, None) is None for name in names):
            raise FamilyError(f"{setting}={source} has no {' or '.join(names)}, which encodes the data")
    return pipe


def _is_there(index: dict[str, Any], name: str) -> bool:
    return bool(index.get(name)) and index[name][1] is not None


def _config_of(source: str, name: str, class_name: str, dtype: torch.dtype) -> ConfigOnly:
    """Read a transformer's config, with the class's defaults for what the file leaves out."""
    import diffusers

    kind = getattr(diffusers, class_name, None)
    if kind is None:
        raise FamilyError(f"{name} of {source} is a {class_name}, which is not in diffusers {diffusers.__version__}")
    with torch.device("meta"):
        model = kind.from_config(kind.load_config(source, subfolder=name))
    return ConfigOnly(model.config, dtype)


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
