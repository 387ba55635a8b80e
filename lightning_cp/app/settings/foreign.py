"""Read the configuration of a run by an unknown author safely: as plain data, checked before anything is built.

Imports neither torch nor diffusers.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_cp.app.settings.table import SettingsError, check_values
from lightning_cp.files import open_regular

# Classes that a configuration may name without trust=true. Full names only: a prefix such as `lightning_cp.` would
# allow functions that run a file or a command.
MODEL_CLASSES = (
    "lightning_cp.app.denoisers.FluxDenoiser",
    "lightning_cp.app.denoisers.WanDenoiser",
    "diffusers.FluxTransformer2DModel",
    "diffusers.WanTransformer3DModel",
)
# Keys that sampling reads. All others (data set, optimizer, trainer, ...) are dropped, so that nothing can build them.
_KEYS: dict[str, tuple[str, ...] | None] = {
    "model": None,
    "data": (
        *("channels", "frames", "height", "width", "num_classes", "num_samples", "held_out"),
        *("patch_size", "token_width"),
    ),
    "sampling": ("num_samples", "num_inference_steps", "guidance_scale"),
}
_REQUIRED = (
    "model._target_",
    *("data.channels", "data.frames", "data.height", "data.width", "data.num_classes"),
    *("sampling.num_samples", "sampling.num_inference_steps", "sampling.guidance_scale"),
)
_MAX_BYTES = 1 << 18
_MAX_DEPTH = 16
_MAX_VALUES = 5000
_PLAIN = (dict, list, str, int, float, bool, type(None))


def read_foreign_run(path: Path, *, trust: bool = False) -> DictConfig:
    """Read the configuration of a run that is used as a source.

    The file is read with a safe YAML loader under limits of size, depth and number of values, without anchors and tags.

    Args:
        path: `.hydra/resolved.yaml` of the run.
        trust: accept any class and any interpolation, and keep all keys.
    Returns: `model`, `data` (without its data set) and `sampling`; with `trust` the whole configuration.
    Raises: SettingsError: the file is damaged, exceeds a limit, lacks a key, or needs `trust`.
    """
    config = _load(path)
    _refuse_finetuning(config, path.parent.parent)
    if not trust:
        _check_no_interpolations(config, "", path)
        check_model_classes(config.get("model"), path)
        config = {name: _select(config.get(name), keys) for name, keys in _KEYS.items()}
    try:
        resolved: Any = OmegaConf.create(
            OmegaConf.to_container(OmegaConf.create(config), resolve=True, throw_on_missing=True)
        )
        missing = [key for key in _REQUIRED if OmegaConf.select(resolved, key) is None]
        if missing:
            raise SettingsError(f"it is not the configuration of a training run, because it lacks {', '.join(missing)}")
        check_values(resolved)
    except (OmegaConfBaseException, SettingsError) as error:
        raise SettingsError(f"{path} cannot be used: {' '.join(str(error).split())}") from error
    return cast(DictConfig, resolved)


def check_model_classes(node: Any, path: Path | str, key: str = "model") -> None:
    """Check that a model's configuration names only `MODEL_CLASSES`.

    Args:
        node: the model's configuration: mappings, lists and plain values.
        path: file of the configuration, for the error message.
        key: dotted key of the node, for the error message.
    Raises: SettingsError: a `_target_`, at any depth, is not in the list.
    """
    if isinstance(node, Mapping) and "_target_" in node and node["_target_"] not in MODEL_CLASSES:
        raise SettingsError(
            f"{path}: {key}._target_={node['_target_']!s:.200} would be called, but without trust=true it must be one "
            f"of {', '.join(MODEL_CLASSES)}. Set trust=true if you trust the authors of this run"
        )
    for name, value in _children(node, key):
        check_model_classes(value, path, name)


def _refuse_finetuning(config: dict[str, Any], run: Path) -> None:
    """Raise SettingsError for the run of a fine-tuning: its checkpoints lack the pipeline and the frozen weights."""
    model = config.get("model")
    pretrained = model.get("pretrained") if isinstance(model, dict) else None
    if not isinstance(model, dict) or pretrained is None:
        return
    way = f"source={pretrained} {'transformer' if config.get('lora') is None else 'lora'}={run}"
    raise SettingsError(f"source={run} is a fine-tuning of {pretrained}, which is not a pipeline: use {way}")


def _load(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise SettingsError(f"{path} is not a file")
        with open_regular(path) as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise SettingsError(f"{path} is too large for the configuration of a run: more than {_MAX_BYTES} bytes")
        text = data.decode()
        _check_structure(text, path)
        config = yaml.load(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a number or date that Python rejects
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"{path} is damaged: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{path} is damaged: expected a mapping, got {type(config).__name__}")
    _check_plain(config, "", path)
    return config


def _check_structure(text: str, path: Path) -> None:
    """Check limits, anchors and tags on the YAML parser's events: no recursion, and nothing is built yet."""
    depth = values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        for kind in ("anchor", "tag"):
            name = getattr(event, kind, None)
            if name is not None:  # an alias, as `*name`, counts as an anchor
                raise SettingsError(
                    f"{path} is damaged: a run's configuration must have no YAML {kind}, got {name:.100}"
                )
        values += isinstance(event, yaml.ScalarEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH or values > _MAX_VALUES:
            limits = f"at most {_MAX_DEPTH} levels and {_MAX_VALUES} keys and values"
            raise SettingsError(f"{path} is too large for the configuration of a run: {limits}")


def _check_plain(node: Any, key: str, path: Path) -> None:
    """Check types. Raises: SettingsError: a key is not a string, or a value is a YAML date, set or bytes."""
    if isinstance(node, dict) and (other := [name for name in node if not isinstance(name, str)]):
        raise SettingsError(f"{path} is damaged: {key or 'the file'} has the key {other[0]!r}; keys must be strings")
    if not isinstance(node, _PLAIN):
        raise SettingsError(f"{path} is damaged: {key}={node!s:.100} must be a string, a number, true, false or null")
    for name, value in _children(node, key):
        _check_plain(value, name, path)


def _check_no_interpolations(node: Any, key: str, path: Path) -> None:
    """Reject `${` in keys and values: it could read environment variables. Raises: SettingsError."""
    for name, value in _children(node, key):
        if "${" in name or (isinstance(value, str) and "${" in value):
            raise SettingsError(
                f"{path}: {name}={value!s:.200} is an interpolation, which a run's resolved configuration cannot have. "
                "Set trust=true if you trust the authors of this run"
            )
        _check_no_interpolations(value, name, path)


def _select(section: Any, keys: tuple[str, ...] | None) -> Any:
    if keys is None or not isinstance(section, dict):
        return section
    return {key: section[key] for key in keys if key in section}


def _children(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for the items of a mapping or list; nothing for other values."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield f"{key}.{name}".removeprefix("."), value
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for i, value in enumerate(node):
            yield f"{key}[{i}]", value
