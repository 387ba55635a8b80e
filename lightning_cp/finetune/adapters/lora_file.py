"""Read a LoRA in diffusers' format, to continue its training, or to sample with it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_cp.export import LORA_FILE
from lightning_cp.files import check_regular, parse_json

SECOND_EXPERT = "transformer_2"  # the expert of Wan 2.2 for low noise
_METADATA_KEY = "lora_adapter_metadata"  # of the safetensors header; diffusers writes JSON there
_OTHER_KINDS = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save")


@dataclass(frozen=True)
class LoraFile:
    """A LoRA of one transformer.

    Attributes:
        path: file it was read from.
        layers: for each layer's name, the tensors `lora_A` and `lora_B`.
        rank: rank of every layer.
        alpha: its scaling is alpha / rank; None if the file does not say.
    """

    path: Path
    layers: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    alpha: float | None


def read_lora(path: str | Path, *, component: str = "transformer") -> LoraFile:
    """Read the LoRA of one transformer.

    Args:
        path: file, or a folder with `pytorch_lora_weights.safetensors`.
        component: prefix of the names in the file: the transformer's name in the pipeline.
    Raises: ValueError: it is missing, damaged, in another format, or not a plain LoRA of one rank.
    """
    file = Path(path) / LORA_FILE if Path(path).is_dir() else Path(path)
    if not file.exists():
        state = f"has no {LORA_FILE}" if Path(path).is_dir() else "does not exist"
        raise ValueError(f"lora.file={path} {state}: expected a safetensors file, or a folder with {LORA_FILE}")
    all_tensors, written = _read(f"lora.file={file}", file)
    tensors = {name: x for name, x in all_tensors.items() if name.startswith(f"{component}.")}
    if not tensors:
        raise ValueError(
            f"lora.file={file} has no weights of {component!r}; its first is {next(iter(all_tensors), 'missing')}. "
            f"Expected diffusers' names, such as {component}.blocks.0.attn1.to_q.lora_A.weight: for another format, "
            "load it with pipeline.load_lora_weights and save it with save_lora_weights"
        )
    if not isinstance(written, dict):
        raise ValueError(f"lora.file={file} is damaged: its metadata must hold a JSON object")
    settings = {key.removeprefix(f"{component}."): x for key, x in written.items() if key.startswith(f"{component}.")}
    _check_weights(f"lora.file={file} cannot be continued", tensors)
    layers = _pairs(file, {name.removeprefix(f"{component}."): x for name, x in tensors.items()})
    return LoraFile(file, layers, _rank(file, layers), _alpha(file, settings))


def load_loras(pipe: Any, files: Sequence[str | Path], scales: Sequence[float]) -> None:
    """Load adapters into a pipeline, each weight into the model that it was trained for, with their strengths.

    diffusers' `load_lora_weights` loads nothing into `transformer_2` of Wan 2.2, refuses LoKr for most pipelines, and
    HunyuanVideo 1.5 has none.

    Args:
        pipe: pipeline, or another object with `components` and their names as attributes.
        files: files of the adapters.
        scales: strength of each: a factor of its output.
    Raises: ValueError: a file is damaged, has weights that are not finite numbers, the pipeline has no second
        transformer, or diffusers finds no weights of the pipeline in a file.
    """
    from diffusers.utils import set_weights_and_activate_adapters

    names = [f"adapter_{i}" for i in range(len(files))]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # the second adapter of a model
        for name, file in zip(names, files, strict=True):
            _load_lora(pipe, Path(file), name)
    for component in pipe.components.values():
        loaded = [(name, scale) for name, scale in zip(names, scales, strict=True) if name in _adapters(component)]
        if loaded:
            set_weights_and_activate_adapters(component, *map(list, zip(*loaded)))
            component.eval()  # diffusers adds layers in training mode, with the dropout of their training


def _load_lora(pipe: Any, file: Path, adapter: str) -> None:
    tensors, _ = _read(f"lora={file}", file)
    _check_weights(f"lora={file} cannot be loaded", tensors)
    components = {name.partition(".")[0] for name in tensors}
    for name in components:
        _check_layers(f"lora={file}", name, getattr(pipe, name, None), tensors)
    where: dict[str, Any] = {"weight_name": file.name, "adapter_name": adapter}
    if components != {SECOND_EXPERT}:
        if hasattr(pipe, "load_lora_weights") and not is_lokr(tensors):
            pipe.load_lora_weights(str(file.parent), **where)
        else:
            pipe.transformer.load_lora_adapter(str(file.parent), prefix="transformer", **where)
    if SECOND_EXPERT in components:
        expert = getattr(pipe, SECOND_EXPERT, None)
        if expert is None:
            raise ValueError(
                f"lora={file} was trained for {SECOND_EXPERT}, which this {type(pipe).__name__} does not have"
            )
        expert.load_lora_adapter(str(file.parent), prefix=SECOND_EXPERT, **where)
    if not any(adapter in _adapters(component) for component in pipe.components.values()):
        raise ValueError(  # diffusers only logs it
            f"lora={file} has no weights of this {type(pipe).__name__}, so it would change nothing; its first is "
            f"{next(iter(tensors), 'missing')}. It must be a LoRA of a pipeline of this kind"
        )


def is_lokr(names: Iterable[str]) -> bool:
    """Return whether the weights of a file are Kronecker products: most pipelines' `load_lora_weights` refuse them."""
    return any(".lokr_" in name for name in names)


def _check_layers(setting: str, component: str, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Check that a model has all layers of a file, with its shapes: diffusers logs what it does not load."""
    if not isinstance(model, nn.Module):
        return
    layers = dict(model.named_modules())
    for name, x in tensors.items():
        layer, *kind = re.split(r"\.(lora_|lokr_)", name.removeprefix(f"{component}."), maxsplit=1)
        if not kind or not name.startswith(f"{component}."):
            continue
        if layer not in layers:
            raise ValueError(f"{setting} is of another model: {type(model).__name__} has no layer {layer}")
        linear = layers[layer]
        sizes = {"lora_A.weight": "in_features", "lora_B.weight": "out_features"}
        size = getattr(linear, sizes.get(name.removeprefix(f"{component}.{layer}."), ""), None)
        if size is not None and size != x.shape[name.endswith("lora_A.weight")]:
            raise ValueError(
                f"{setting} is of another model: {name} has the shape {list(x.shape)}, but the layer of "
                f"{type(model).__name__} has {linear.in_features} inputs and {linear.out_features} outputs"
            )


def _adapters(component: Any) -> Mapping[str, Any]:
    """Return the adapters of a component by name."""
    return getattr(component, "peft_config", None) or {}


def _read(setting: str, file: Path) -> tuple[dict[str, Tensor], Any]:
    """Return all tensors and the settings in the metadata. Raises: ValueError: the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(file)
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return tensors, parse_json((opened.metadata() or {}).get(_METADATA_KEY, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{setting} is damaged or not a safetensors file ({error})") from None


def _check_weights(refused: str, tensors: Mapping[str, Tensor]) -> None:
    """Check that all weights are finite floats. Raises: ValueError: one is not. Args: refused: begins the message."""
    for name, x in tensors.items():
        if not x.is_floating_point() or not x.float().isfinite().all():
            state = f"in {x.dtype}, not a float dtype" if not x.is_floating_point() else "not finite (NaN or inf)"
            raise ValueError(f"{refused}: its weight {name} is {state}")


def _pairs(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Group the tensors by layer."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        layer, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind not in ("lora_A", "lora_B") or not name.endswith(".weight"):
            raise ValueError(
                f"lora.file={file} has the weight {name}, but a plain LoRA has only ….lora_A.weight and "
                "….lora_B.weight: load it with pipeline.load_lora_weights and save it with save_lora_weights"
            )
        pairs.setdefault(layer, {})[kind] = x
    for layer, pair in pairs.items():
        if len(pair) < 2:
            raise ValueError(f"lora.file={file} is incomplete: {layer} has only {next(iter(pair))}")
    return {layer: (pair["lora_A"], pair["lora_B"]) for layer, pair in pairs.items()}


def _rank(file: Path, layers: Mapping[str, tuple[Tensor, Tensor]]) -> int:
    ranks: dict[int, str] = {}
    for layer, (a, _) in layers.items():
        ranks.setdefault(a.shape[0], layer)
    if len(ranks) > 1:
        listed = ", ".join(f"{rank} ({layer})" for rank, layer in ranks.items())
        raise ValueError(f"lora.file={file} has layers of several ranks, which cannot be continued: {listed}")
    return next(iter(ranks))


def _alpha(file: Path, settings: Mapping[str, Any]) -> float | None:
    for name in _OTHER_KINDS:
        if settings.get(name):
            raise ValueError(f"lora.file={file} cannot be continued, because it has {name}={settings[name]!r}")
    alpha = settings.get("lora_alpha")
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not alpha > 0):
        raise ValueError(f"lora.file={file} is damaged: its metadata has lora_alpha={alpha!r}")
    return alpha
