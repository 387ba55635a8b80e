"""Load a pipeline from a folder or from the Hub, or build its components without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from lightning_cp.files import read_json
from lightning_cp.finetune.modular import load_modular
from lightning_cp.pipeline_folder import MODULAR_INDEX, find_pipeline, index_file, read_index


def load_pipeline(
    source: str,
    dtype: Any,
    *,
    setting: str = "source",
    without: Sequence[str] = (),
    components: Mapping[str, nn.Module] = MappingProxyType({}),
) -> Any:
    """Load a pipeline from a folder or from the Hub.

    A modular pipeline is loaded as a pipeline of the same name that is not modular, if diffusers has one
    (its name without `Modular`), otherwise with the call of such pipelines, see `called_like_others`.

    Args:
        setting: name of the setting that holds `source`, for the error message.
        without: names of components that are not loaded; they are None.
        components: components that are used instead of those in the source, by name.
    Raises: ValueError: it cannot be loaded; the reason in one line.
    """
    import diffusers
    from diffusers import DiffusionPipeline

    where = f"{setting}={source}"
    find_pipeline(source, setting=setting)
    try:
        if is_modular_source(source):
            pipe = load_modular(source, dtype, without=without, components=components)
        else:
            index, kind = read_index(find_pipeline(source, setting=setting)), DiffusionPipeline
            if without or components:  # DiffusionPipeline itself would load optional components all the same
                kind = getattr(diffusers, str(index.get("_class_name")), kind)
            absent = [name for name, x in index.items() if x == [None, None]]  # loaded only if they are passed as None
            pipe = kind.from_pretrained(source, dtype=dtype, **{**dict.fromkeys([*without, *absent]), **components})
    except Exception as error:
        quantised = [name for name in _quantised(source) if name not in {*without, *components}]
        if quantised:
            raise quantised_error(where, quantised, error) from error
        if isinstance(error, (OSError, RecursionError)):
            raise ValueError(f"{where} cannot be loaded: {' '.join(str(error).split())}") from None
        if not isinstance(error, ValueError) or "trust_remote_code" not in str(error):
            raise
        files = ", ".join(_code_files(source)) or "named in model_index.json"
        raise ValueError(
            f"{where} contains Python code (files: {files}), which is not run: use a pipeline with classes "
            "from diffusers and transformers only. Or read the code, load the pipeline in your script with "
            "trust_remote_code=True, and call parallelize_pipeline on it"
        ) from error
    _check_quantised(where, {name: x for name, x in pipe.components.items() if name not in components})
    return pipe


def quantised_error(where: str, names: Sequence[str], reason: object) -> ValueError:
    """Return the error for components with a `quantization_config` that cannot be loaded, as one line."""
    have = "has" if len(names) == 1 else "have"
    return ValueError(
        f"{where}: {' and '.join(names)} {have} a quantization_config, and cannot be loaded: "
        f"{' '.join(str(reason).split())[:500].rstrip('.')}. Install what the quantiser needs, or use weights that are "
        "not quantised"
    )


def _quantised(source: str) -> list[str]:
    from diffusers import DiffusionPipeline

    folder = Path(source)
    if not folder.is_dir():
        try:
            folder = Path(DiffusionPipeline.download(source, local_files_only=True))
        except Exception:  # it could not be downloaded
            return []
    return [path.parent.name for path in sorted(folder.glob("*/config.json")) if _has_quantiser(path)]


def _has_quantiser(config: Path) -> bool:
    try:
        return "quantization_config" in read_json(config)
    except ValueError:  # it is damaged
        return False


def _check_quantised(where: str, components: Mapping[str, Any]) -> None:
    """Raise ValueError if transformers does not know a component's quantiser: it takes the weights as they are."""
    for name, module in components.items():
        quantization = getattr(getattr(module, "config", None), "quantization_config", None)
        if quantization is not None and getattr(module, "hf_quantizer", None) is None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise quantised_error(where, [name], f"transformers does not know the quantiser {method}")


def is_modular_source(source: str) -> bool:
    """Return whether a source has the index of a modular pipeline only."""
    index = index_file(find_pipeline(source, setting="source"))
    return index is not None and index.name == MODULAR_INDEX


def _code_files(source: str) -> list[str]:
    folder = Path(source)
    return sorted(str(path.relative_to(folder)) for pattern in ("*.py", "*/*.py") for path in folder.glob(pattern))
