"""Check the transformers that a run of fine-tuning trains, against the pipeline's folder.

Imports neither torch nor diffusers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_cp.files import read_json
from lightning_cp.finetune.family_table import (
    CONTROLNET,
    FAMILIES,
    controlnet_error,
    experiments_of,
    family_of_pipeline,
)
from lightning_cp.finetune.settings import check_ranges
from lightning_cp.pipeline_folder import check_source, index_file, read_index
from lightning_cp.recipes.settings.table import SettingsError, read, show
from lightning_cp.recipes.settings.world import shards_weights
from lightning_cp.rules import Each, Number, Text


def components_of(config: DictConfig) -> list[str]:
    """Return the names of the transformers to train: several are experts."""
    component = read(config, "model.component")
    return component if isinstance(component, list) else [component]


def check_components(config: DictConfig) -> None:
    """Check the transformers to train, and the sigma range of each of them."""
    component, names = read(config, "model.component"), components_of(config)
    if not all(map(Text().passes, names)) or (names != [component] and not 1 < len(set(names)) == len(names)):
        raise SettingsError(
            f"model.component={show(component)} is not valid: must be the name of a transformer, or a list of the "
            "different names of two experts, such as [transformer,transformer_2]"
        )
    sigma_range, pair = read(config, "objective.sigma_range"), Each(Number(minimum=0, maximum=1), 2)
    if sigma_range is None:
        return
    problem = f"objective.sigma_range={show(sigma_range)} is not valid"
    ranges = [sigma_range] if names == [component] else sigma_range
    if not isinstance(ranges, list) or not all(map(pair.passes, ranges)):
        several = "" if names == [component] else ", for each expert, such as [[0.875,1.0],[0.0,0.875]]"
        raise SettingsError(f"{problem}: must be null, or two numbers from 0 to 1{several}")
    if len(ranges) != len(names):
        raise SettingsError(
            f"{problem}: must have a range for each of {', '.join(names)}, in this order, or be null for the ranges of "
            "the pipeline"
        )
    try:
        check_ranges(dict(zip(names, ranges, strict=True)))
    except ValueError as error:
        raise SettingsError(f"{problem}: {error}") from None


def check_pretrained(config: DictConfig) -> None:
    """Check that the pipeline is a folder or an id on the Hub. Raises: SettingsError: it is not."""
    try:
        check_source(str(read(config, "model.pretrained")), "model.pretrained")
    except ValueError as error:
        raise SettingsError(str(error)) from None


def check_transformers(config: DictConfig) -> None:
    """Check the components and their number of heads, if the pipeline is a local folder."""
    check_pretrained(config)
    source = Path(str(read(config, "model.pretrained")))
    if not source.is_dir():
        return
    index = _index(source)
    _check_experiment(source, index.get("_class_name"))
    listed = [name for name, value in index.items() if isinstance(value, list)]
    names = [name for name in listed if (source / name / "config.json").is_file()]
    for component in components_of(config):
        if component not in names:
            raise SettingsError(
                f"model.component={component} is not in {source}, which has {', '.join(sorted(names)) or 'no models'}"
            )
        _check_component(config, source, component, {name: index[name] for name in names})
    boundary, needs = index.get("boundary_ratio"), read(config, "objective.sigma_range") is None
    if len(components_of(config)) > 1 and needs and not Number(above=0, below=1).passes(boundary):
        raise SettingsError(
            f"model.component={show(read(config, 'model.component'))} are experts for different noise levels, but "
            f"{index_file(source)} has boundary_ratio={show(boundary)}, expected a number above 0 and below "
            "1: set objective.sigma_range to a range for each of them"
        )


def check_heads(settings: Mapping[str, Any], folder: Path, ulysses: int) -> None:
    """Raise SettingsError if `ulysses` is above the heads that a transformer's configuration names."""
    names = "num_attention_heads", "num_heads", "n_heads"  # in diffusers
    heads = next((x for name in names if isinstance(x := settings.get(name), int)), ulysses)
    if ulysses > heads:
        raise SettingsError(f"ulysses={ulysses} is not valid: must be at most {heads}, the attention heads of {folder}")


def _check_experiment(source: Path, pipeline: object) -> None:
    """Check that a chosen experiment of ours is one for the class of the pipeline."""
    chosen = HydraConfig.get().runtime.choices.get("experiment") if HydraConfig.initialized() else None
    family = family_of_pipeline(pipeline)
    fitting = experiments_of(family) if family is not None else [chosen]
    if chosen not in fitting and any(chosen in experiments_of(name) for name in FAMILIES):
        raise SettingsError(
            f"experiment={chosen} is not for model.pretrained={source}, which is a {pipeline}: use "
            f"{' or '.join(f'experiment={name}' for name in fitting)}"
        )


def _check_component(config: DictConfig, source: Path, component: str, models: Mapping[str, list[Any]]) -> None:
    """Check that a component may be trained. Args: models: entries of the index."""
    transformers = [name for name, entry in models.items() if _is_transformer(entry)]
    if component not in transformers:
        raise SettingsError(
            f"model.component={component} is {models[component][-1]}, no transformer: use one of "
            f"{', '.join(sorted(transformers))}"
        )
    settings = read_file(source / component / "config.json", "model.pretrained")
    if component == CONTROLNET:
        base = read_file(source / "transformer" / "config.json", "model.pretrained")
        if error := controlnet_error(str(models[component][-1]), settings, base):
            raise SettingsError(f"model.pretrained={source}: {error}")
    check_heads(settings, source / component, read(config, "ulysses"))
    if "quantization_config" in settings:
        check_quantised(config, f"{source / component} has quantised weights")
        check_whole(config, f"{source / component} has quantised weights")


def check_quantised(config: DictConfig, weights: str) -> None:
    """Check what cannot be done with quantised weights. Args: weights: why they are quantised."""
    if components_of(config) == [CONTROLNET]:
        raise SettingsError(
            f"{weights}, which cannot be trained, and a ControlNet takes no adapters: use other weights"
        )
    if config.get("lora") is None:
        raise SettingsError(f"{weights}, which cannot be trained: train a LoRA on them, for example lora.rank=16")


def check_whole(config: DictConfig, weights: str) -> None:
    """Check that weights of a quantiser's library are not sharded. Args: weights: what they are."""
    if shards_weights(config):
        raise SettingsError(
            f"{weights}, which FSDP cannot shard: use strategy=cp, which keeps them whole on each rank, or a pipeline "
            "in bfloat16, with model.quantize=nf4 if it is too large"
        )
    if read(config, "model.quantize") is not None:
        raise SettingsError(f"{weights}: leave model.quantize={read(config, 'model.quantize')} out")


def _is_transformer(entry: list[Any]) -> bool:
    """Return whether an entry of a pipeline's index, [library, class], may be trained."""
    return entry[0] == "diffusers" and not str(entry[-1]).startswith("Autoencoder")


def _index(source: Path) -> dict[str, Any]:
    try:
        return read_index(source)
    except ValueError as error:
        raise SettingsError(f"model.pretrained: {error}") from None


def read_file(path: Path, key: str) -> dict[str, Any]:
    """Read a JSON file that a setting names. Raises: SettingsError: it is damaged."""
    try:
        return read_json(path)
    except ValueError as error:
        raise SettingsError(f"{key}: {error}") from None
