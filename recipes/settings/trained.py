"""Find the trained weights that `lightning-cp sample` uses: denoisers of runs, adapters and models for pipelines.

Imports neither torch nor diffusers.
"""

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.files import read_json
from lightning_cp.recipes.settings.table import SettingsError, read, show
from lightning_cp.rules import Each, Either, Integer, Number, OneOf, Text, check_rules, ruled

DENOISER_FILE = "denoiser.json"  # written last: a run with this file is complete
_TRANSFORMERS = {"WanDenoiser": "WanTransformer3DModel", "FluxDenoiser": "FluxTransformer2DModel"}
_LORA_FILE = "pytorch_lora_weights.safetensors"
_MODELS = ("transformer", "transformer_2", "controlnet")  # folders that a run writes


@dataclass(frozen=True)
class TrainedDenoiser:
    """A denoiser that `lightning-cp train` trained from scratch: plain data, from which nothing else is built.

    Attributes:
        denoiser: class of `lightning_cp.recipes.digits.denoisers`.
        num_classes, num_tokens, patch_size: its arguments; None: it does not have this one.
        size: channels, frames, height and width of a sample.
        is_digits: True if the samples are scanned digits, which are classified.
        num_samples, num_inference_steps, guidance_scale: the run's settings for sampling.
    Raises: ValueError: an invalid value.
    """

    denoiser: str = ruled(MISSING, OneOf((*_TRANSFORMERS,)))
    num_classes: int = ruled(MISSING, Integer(1))
    num_tokens: int = ruled(MISSING, Integer(2))
    patch_size: Sequence[int] | None = ruled(MISSING, Either(OneOf((None,)), Each(Integer(1), 3)))
    size: Sequence[int] = ruled(MISSING, Each(Integer(1), 4))
    is_digits: bool = ruled(MISSING, OneOf((True, False)))
    num_samples: int = ruled(MISSING, Integer(1))
    num_inference_steps: int = ruled(MISSING, Integer(1))
    guidance_scale: float = ruled(MISSING, Number(minimum=0))

    def __post_init__(self) -> None:
        check_rules(self)

    def write(self, run: Path) -> None:
        """Write `denoiser.json` of a run. Raises: OSError."""
        with atomic_file(run / DENOISER_FILE) as scratch:
            scratch.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, run: Path) -> "TrainedDenoiser":
        """Read `denoiser.json` of a run, and check the class of its `transformer/`.

        Raises: ValueError: a file is missing or damaged, or has other keys, values or another class.
        """
        path, names = run / DENOISER_FILE, {one.name for one in fields(cls)}
        values = read_json(path)
        if values.keys() != names:
            raise ValueError(f"{path} must have the keys {', '.join(sorted(names))}, got {', '.join(sorted(values))}")
        try:
            trained = cls(**values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        kind = read_json(run / "transformer/config.json").get("_class_name")
        if kind != _TRANSFORMERS[trained.denoiser]:
            raise ValueError(f"{run}/transformer has a {kind}, but {trained.denoiser} needs another class")
        return trained


def find_run(config: DictConfig) -> Path:
    """Return the folder of the run that `source` names; `last`: the newest under output_root. Raises: SettingsError."""
    source, root = read(config, "source"), read(config, "output_root")
    if source == "last":
        return newest("source", root, [DENOISER_FILE], "run that was trained from scratch").parent
    run = Path(source).absolute()
    if (run / DENOISER_FILE).is_file():
        return run
    raise SettingsError(
        f"source={source} has no {DENOISER_FILE}: must be last, a complete run from scratch, or a pipeline. "
        f"For a fine-tuning, use source=<its pipeline> lora={source} or transformer={source}"
    )


def find_adapters(config: DictConfig) -> dict[str, Any]:
    """Return `lora`, the files of the adapters, and `lora_scale`, the strength of each. Raises: SettingsError."""
    chosen, scales = read(config, "lora"), read(config, "lora_scale")
    if chosen is None:
        if scales is not None:
            raise SettingsError(f"lora_scale={show(scales)} has no effect without an adapter: set lora")
        return {"lora": None, "lora_scale": None}
    sources = chosen if isinstance(chosen, list) else [chosen]
    if not sources or not all(map(Text().passes, sources)):
        raise SettingsError(f"lora={show(chosen)} is not valid: must be last, the path of an adapter, or several")
    files = [_adapter(source, read(config, "output_root")) for source in sources]
    twice = next((source for source, file in zip(sources, files) if files.count(file) > 1), None)
    if twice is not None:
        raise SettingsError(
            f"lora={show(chosen)} is not valid: {twice} is listed twice; set its strength in lora_scale"
        )
    return {"lora": files, "lora_scale": _scales(scales, len(files))}


def _scales(scales: Any, count: int) -> Sequence[float]:
    """Return the strength of each adapter."""
    listed = scales if isinstance(scales, list) else [1.0 if scales is None else scales] * count
    if len(listed) != count or not all(map(Number().passes, listed)):
        expected = "a number, or a list with a number for each adapter of lora"
        raise SettingsError(f"lora_scale={show(scales)} is not valid: must be {expected} ({count})")
    return listed


def _adapter(source: str, output_root: str) -> str:
    """Return the file of an adapter; `last` is the newest under output_root."""
    if source == "last":
        return str(newest("lora", output_root, [f"lora/{_LORA_FILE}"], "adapter"))
    path = Path(source)
    if not path.exists():
        raise SettingsError(f"lora={source} does not exist: it must be last, or the folder or file of an adapter")
    for file in [path] if path.is_file() else [path / _LORA_FILE, path / "lora" / _LORA_FILE]:
        if file.is_file():
            return str(file.absolute())
    raise SettingsError(f"lora={source} has no {_LORA_FILE}, and no subfolder lora that has one")


def find_models(config: DictConfig, entries: dict[str, Any]) -> dict[str, str] | None:
    """Return the folders of the trained models of `transformer`, by component.

    Args: entries: the pipeline's model_index.json; empty if it is not a local folder.
    Raises: SettingsError: there is none, or it is no component of the pipeline.
    """
    chosen = read(config, "transformer")
    if chosen is None:
        return None
    if not Text().passes(chosen):
        raise SettingsError(f"transformer={show(chosen)} is not valid: must be last, or the folder of a run or a model")
    path = Path(chosen)
    if chosen == "last":
        files = [f"{name}/config.json" for name in _MODELS]
        path = newest("transformer", read(config, "output_root"), files, "trained model").parent.parent
    if (path / "config.json").is_file():
        folders = {path.name if path.name in _MODELS else "transformer": path}
    else:
        folders = {name: path / name for name in _MODELS if (path / name / "config.json").is_file()}
    if not folders:
        raise SettingsError(
            f"transformer={chosen} has no trained model: it must be last, the folder of a run that has "
            f"{', '.join(_MODELS[:-1])} or {_MODELS[-1]}, or such a folder"
        )
    for name, folder in folders.items():
        _check_model(f"transformer={chosen}", name, folder, entries)
    return {name: str(folder.absolute()) for name, folder in folders.items()}


def _check_model(setting: str, name: str, folder: Path, entries: dict[str, Any]) -> None:
    """Compare a model's class with that of the pipeline's component."""
    try:
        kind = read_json(folder / "config.json").get("_class_name")
    except ValueError as error:
        raise SettingsError(f"{setting}: {error}") from None
    expected = entries.get(name)
    if entries and (not isinstance(expected, list) or expected[-1] != kind):
        has = f"its {name} is a {expected[-1]}" if isinstance(expected, list) else f"it has no {name}"
        raise SettingsError(f"{setting}: {folder} has a {kind}, which does not fit the pipeline: {has}")


def newest(setting: str, output_root: str, files: Sequence[str], what: str) -> Path:
    """Return the newest of some files in the run folders, without exports of the lowest validation loss."""
    root = Path(output_root).absolute()
    found = [path for file in files for path in root.glob(f"**/{file}") if path.parent.parent.name != "best"]
    if not found:
        raise SettingsError(f"{setting}=last found no {what} under output_root={root}: make it with lightning-cp train")
    return max(found, key=lambda path: path.stat().st_mtime)
