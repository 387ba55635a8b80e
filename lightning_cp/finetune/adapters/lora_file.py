"""Read a LoRA in diffusers' format, to continue its training, or to sample with it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
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


def read_lora(path: str | Path, *, component: str = "transformer", trained: Collection[str] = ()) -> LoraFile:
    """Read the LoRA of one transformer.

    Args:
        path: file, or a folder with `pytorch_lora_weights.safetensors`.
        component: prefix of the names in the file: the transformer's name in the pipeline.
        trained: names of other models for which the file is read, too.
    Raises: ValueError: it is missing, damaged, in another format, not a plain LoRA of one rank, or has weights of other
        models, too.
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
    lost = {name.partition(".")[0] for name in all_tensors} - {component, *trained}
    if lost:
        raise ValueError(
            f"lora.file={file} has weights of {', '.join(sorted(lost))}, which are not trained and would be missing "
            "in the new adapter: train both experts, or continue a file that has only weights of what is trained"
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
    Raises: ValueError: a file is damaged, has weights that are not finite numbers, or weights that the pipeline does
        not take, in whole or in part.
    """
    from diffusers.utils import set_weights_and_activate_adapters

    names = [f"adapter_{i}" for i in range(len(files))]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # the second adapter of a model
        for name, file in zip(names, files, strict=True):
            _load_lora(pipe, Path(file), name)
    for component in pipe.components.values():
        adapters = getattr(component, "peft_config", None) or {}
        loaded = [(name, scale) for name, scale in zip(names, scales, strict=True) if name in adapters]
        if loaded:
            set_weights_and_activate_adapters(component, *map(list, zip(*loaded)))
            component.eval()  # diffusers adds layers in training mode, with the dropout of their training


def _load_lora(pipe: Any, file: Path, adapter: str) -> None:
    setting, kind = f"lora={file}", type(pipe).__name__
    tensors, _ = _read(setting, file)
    _check_weights(f"{setting} cannot be loaded", tensors)
    components = {name.partition(".")[0] for name in tensors}
    expert = getattr(pipe, SECOND_EXPERT, None)
    if SECOND_EXPERT in components and expert is None:
        raise ValueError(f"{setting} was trained for {SECOND_EXPERT}, which this {kind} does not have")
    where: dict[str, Any] = {"weight_name": file.name, "adapter_name": adapter}
    try:
        if components != {SECOND_EXPERT}:
            if hasattr(pipe, "load_lora_weights") and not is_lokr(tensors):
                pipe.load_lora_weights(str(file.parent), **where)
            else:
                pipe.transformer.load_lora_adapter(str(file.parent), prefix="transformer", **where)
        if expert is not None and SECOND_EXPERT in components:
            expert.load_lora_adapter(str(file.parent), prefix=SECOND_EXPERT, **where)
        expected = _names_in_models(pipe, tensors)
    except (ValueError, RuntimeError, LookupError) as error:  # from diffusers and peft
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{setting} is of another model: this {kind} cannot load it ({reason})") from error
    pairs = {re.sub(r"\.lora_[AB]\.weight$", f".lora_{x}.weight", name) for name in expected for x in "AB"}
    lost = [*_not_loaded(pipe, expected, adapter), *sorted(pairs - expected.keys())]
    if lost or not expected:
        raise ValueError(
            f"{setting} is of another model, or incomplete: this {kind} has loaded {len(pairs) - len(lost)} of its "
            f"{len(pairs)} weights, and not {', '.join(lost[:3])}. Expected an adapter of a pipeline of this kind"
        )


def is_lokr(names: Iterable[str]) -> bool:
    """Return whether the weights of a file are Kronecker products: most pipelines' `load_lora_weights` refuse them."""
    return any(".lokr_" in name for name in names)


def _names_in_models(pipe: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a file, in any format that diffusers reads, by the names that they get in the models."""
    from diffusers.utils import convert_state_dict_to_peft, convert_unet_state_dict_to_peft

    differences = {name: x for name, x in tensors.items() if name.endswith((".diff", ".diff_b")) and x.any()}
    left_out = {name: x for name, x in tensors.items() if "dora_scale" in name}  # by diffusers
    if hasattr(pipe, "lora_state_dict") and not is_lokr(tensors):
        converted = pipe.lora_state_dict(dict(tensors))
        tensors = converted[0] if isinstance(converted, tuple) else converted
        kept = {id(x) for x in tensors.values()}
        left_out |= {name: x for name, x in differences.items() if id(x) not in kept}
    text = {name: x for name, x in tensors.items() if name.startswith("text_encoder")}
    others = convert_unet_state_dict_to_peft({name: x for name, x in tensors.items() if name not in text})
    if text and not any(".lora_A." in name for name in text):
        text = convert_state_dict_to_peft(text)
    return {**left_out, **others, **text}


def _not_loaded(pipe: Any, expected: Mapping[str, Tensor], adapter: str) -> list[str]:
    """Return the names of weights that no model of a pipeline has: diffusers only logs them, or says nothing."""
    models = {name: x for name, x in pipe.components.items() if isinstance(x, nn.Module)}
    states = {f"{name}.{key}": x for name, model in models.items() for key, x in model.state_dict().items()}
    # Older files of CLIP have one more level. Other weights than an adapter's, such as norms, replace a model's.
    names = ((f".{adapter}", ""), (".text_model.", "."), ("magnitude_vector.weight", "magnitude_vector"))  # DoRA
    loaded = {reduce(lambda name, pair: name.replace(*pair), names, name): x for name, x in states.items()}
    return [
        name
        for name, x in expected.items()
        if (found := loaded.get(name.replace(".text_model.", "."))) is None
        or (not re.search(r"\.(lora|lokr)_", name) and not torch.equal(found, x.to(found)))
    ]


def _read(setting: str, file: Path) -> tuple[dict[str, Tensor], Any]:
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
