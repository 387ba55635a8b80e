"""Load a pretrained transformer for training: whole, or as shards that each rank reads from the files itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.engine.apply import no_plan_message
from lightning_cp.engine.meta import default_dtype, load_when_allocated, weights_on_meta
from lightning_cp.errors import PlanError
from lightning_cp.files import read_json
from lightning_cp.finetune.pipeline import quantised_error
from lightning_cp.finetune.weight_files import WeightFiles, WeightStream, check_names, find_weights, local_pipeline
from lightning_cp.pipeline_folder import read_index
from lightning_cp.plans import registered_plan


def load_transformer(
    source: str | Path, component: str = "transformer", *, dtype: torch.dtype, setting: str = "model.pretrained"
) -> nn.Module:
    """Load a pipeline's transformer with all its weights, in training mode, on the CPU.

    Args:
        source: a pipeline's folder, or its id on the Hub.
        component: name of the transformer in the pipeline (Wan 2.2 has `transformer` and `transformer_2`).
        dtype: dtype of the weights; classes of diffusers keep some in float32 (`_keep_in_fp32_modules`).
        setting: name of the setting that holds `source`, for error messages.
    Raises:
        ValueError: it is no pipeline, has no such component, contains code or pickle files, or a file is missing,
            damaged or of another model.
        PlanError: the component's class has no plan.
    """
    _check_dtype(dtype)
    folder = local_pipeline(source, component, setting=setting)
    kind, config = _class_and_config(folder, component, f"{setting}={source}")
    files = find_weights(folder / component)
    if "quantization_config" not in config:  # the names in quantised files are those of the quantiser
        _check_names(_on_meta(kind, config, dtype), files)
    try:
        model: nn.Module = kind.from_pretrained(str(folder), subfolder=component, dtype=dtype, use_safetensors=True)
    except Exception as error:  # a quantiser is not installed, or rejects its settings
        if "quantization_config" not in config:
            raise
        raise quantised_error(f"{setting}={source}", [component], error) from error
    model.train()
    return model


def load_exported(folder: str | Path, *, dtype: torch.dtype) -> nn.Module:
    """Load a model that fine-tuning or `save_pretrained` has written, in eval mode, on the CPU.

    Raises: ValueError: a file is missing, damaged or of another model, or the class is not one of diffusers.
    """
    import diffusers

    path = Path(folder)
    config = read_json(path / "config.json")
    kind = getattr(diffusers, str(config.get("_class_name")), None)
    if kind is None:
        raise ValueError(f"{path} has a {config.get('_class_name')}, which is not a model of diffusers")
    _check_names(_on_meta(kind, config, dtype), find_weights(path))
    model: nn.Module = kind.from_pretrained(str(path), dtype=dtype, use_safetensors=True)
    return model.eval()


def meta_transformer(
    source: str | Path, component: str = "transformer", *, dtype: torch.dtype, setting: str = "model.pretrained"
) -> nn.Module:
    """Build a pipeline's transformer on the meta device; its weights are loaded during set-up.

    During `fabric.setup`, or while the Trainer sets up its strategy, each rank reads its own shards from the
    safetensors files (see `stream_weights`). No rank holds the whole model, and no weights are sent. Afterwards,
    weights and buffers equal those of `load_transformer`. Adapters can be added before set-up.

    In a pipeline, `parallelize_pipeline` loads the weights, with `pipe` above 1 only those of the rank's stage.

    Args, Raises: see `load_transformer`. ValueError also for quantised weights, which cannot be read in slices.
    """
    _check_dtype(dtype)
    folder = local_pipeline(source, component, setting=setting)
    kind, config = _class_and_config(folder, component, f"{setting}={source}")
    if "quantization_config" in config:
        raise ValueError(
            f"{setting}={source}: {component} has quantised weights, which cannot be sharded: use strategy=cp, which "
            "loads them whole on each rank"
        )
    files = find_weights(folder / component)
    model: Any = _on_meta(kind, config, dtype)
    _check_names(model, files)
    model.register_to_config(_name_or_path=str(folder))
    load_when_allocated(model, WeightStream(str(folder / component)))
    model.train()
    return model  # type: ignore[no-any-return]


def meta_transformers(source: str | Path, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Build those transformers of a pipeline on the meta device that `meta_transformer` can build, by component name.

    Returns: none if the pipeline is not found, or has code or no transformer; loading it whole gives the reason.
    """
    transformers = {}
    for name in ("transformer", "transformer_2"):
        with suppress(ValueError, PlanError):
            transformers[name] = meta_transformer(source, name, dtype=dtype, setting="source")
    return transformers


def _check_dtype(dtype: Any) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"dtype={dtype} must be torch.float32, torch.bfloat16, torch.float16 or torch.float64")


def _class_and_config(folder: Path, component: str, source: str) -> tuple[Any, dict[str, Any]]:
    import diffusers

    index = read_index(folder)
    models = {name: x for name, x in index.items() if _is_model(x)}
    if component not in models:
        there = [name for name, x in models.items() if _has_plan(x)] or list(models)
        raise ValueError(f"{source} has no transformer {component!r}, only {', '.join(there) or 'no models at all'}")
    library, name = models[component]
    code = sorted(path.name for path in (folder / component).glob("*.py"))
    if code or library not in ("diffusers", "transformers"):
        raise ValueError(
            f"{source}: {component} is a {name} from Python code in the pipeline ({', '.join(code) or library}), which "
            "is not run: use a pipeline with classes from diffusers only. Or read the code, and load the transformer "
            "in your script with trust_remote_code=True"
        )
    kind = getattr(diffusers, name, None) if library == "diffusers" else None
    if kind is None:
        raise ValueError(
            f"{source}: {component} is {library}.{name}, which is not a transformer of diffusers "
            f"{diffusers.__version__}"
        )
    if registered_plan(kind) is None:
        raise PlanError(f"{source}: {component} cannot be trained: {no_plan_message(kind)}")
    return kind, read_json(folder / component / "config.json")


def _is_model(entry: object) -> bool:
    """Return whether an entry of a pipeline's index names a component that the pipeline has."""
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(x, str) for x in entry)


def _has_plan(entry: tuple[str, str]) -> bool:
    import diffusers

    kind = getattr(diffusers, entry[1], None) if entry[0] == "diffusers" else None
    return kind is not None and registered_plan(kind) is not None


def _on_meta(kind: Any, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Build a model without storage for its weights, in the dtypes that `from_pretrained` gives them.

    Buffers that no file holds (tables of rotary embeddings) are computed, also under the same default dtype.
    """
    with default_dtype(dtype), weights_on_meta():
        model = kind.from_config(dict(config))
    kept = set(kind._keep_in_fp32_modules or ())

    def dtype_of(name: str, x: Tensor) -> torch.dtype:
        if not x.is_floating_point():
            return x.dtype
        return torch.float32 if kept & set(name.split(".")) else dtype

    in_files, replaced = set(model.state_dict()), dict[nn.Parameter, nn.Parameter]()  # tied weights stay tied
    for path, inner in model.named_modules():
        for key, p in list(inner.named_parameters(recurse=False)):
            new = nn.Parameter(p.data.to(dtype_of(f"{path}.{key}", p)), requires_grad=p.requires_grad)
            inner.register_parameter(key, replaced.setdefault(p, new))
        for key, x in list(inner.named_buffers(recurse=False)):
            if f"{path}.{key}".lstrip(".") in in_files:
                inner.register_buffer(key, x.to(dtype_of(f"{path}.{key}", x)))
    return model


def _check_names(model: Any, files: WeightFiles) -> None:
    where = f"{files.folder} does not fit its config.json ({type(model).__name__})"
    check_names(where, {name: tuple(x.shape) for name, x in model.state_dict().items()}, files, model)
