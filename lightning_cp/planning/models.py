"""Models to plan for: a class of diffusers with a configuration, and inputs without values for a size of media."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.files import read_json
from lightning_cp.nest import replace
from lightning_cp.pipeline_folder import read_index
from lightning_cp.pipelines.components import build_component
from lightning_cp.planning.dry_run import is_ours
from lightning_cp.plans import registered_plan
from lightning_cp.plans.example_inputs import ExampleInputs
from lightning_cp.plans.examples import EXAMPLES
from lightning_cp.rules import Integer, check_rules, ruled


@dataclass(frozen=True)
class PlannedModel:
    """A model and the inputs of one forward.

    Attributes:
        name: name for tables.
        build: makes the model; called where tensors have no storage.
        inputs: arguments of the forward; see `dry_run`.
        heads: number of query heads; None: not known.
        tokens: number of tokens of the main sequence; None: not known.
        guided: the pipeline uses classifier-free guidance: two forwards for each step of sampling.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Mapping[str, Any]
    heads: int | None = None
    tokens: int | None = None
    guided: bool = False


@dataclass(frozen=True)
class MediaSize:
    """Media that a model is planned for. Attributes: height, width: pixels. text: tokens. batch: samples."""

    height: int = ruled(MISSING, Integer(1))
    width: int = ruled(MISSING, Integer(1))
    frames: int = ruled(1, Integer(1))
    text: int = ruled(512, Integer(0))
    batch: int = 1

    def __post_init__(self) -> None:
        check_rules(self)


def heads_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of query heads in a model's configuration; None: it is not there."""
    counts = (config.get(name) for name in ("num_attention_heads", "num_heads", "n_heads"))
    return next((x for x in counts if isinstance(x, int)), None)  # some classes have a list


def diffusers_model(
    kind: str,
    config: Mapping[str, Any],
    size: MediaSize,
    *,
    name: str | None = None,
    guided: bool | None = None,
    compression: tuple[int, int] | None = None,
    time_per_token: bool = False,
) -> PlannedModel:
    """Return a transformer of diffusers with its inputs.

    Args:
        kind: name of its class.
        config: its configuration; missing entries have the defaults of the class.
        name: for tables; None: `kind`.
        guided: see `PlannedModel`; None: True unless the model embeds the guidance scale.
        compression: pixels of a latent, and frames of a latent (0: the model makes pictures), of the pipeline's VAE;
            None: those that are usual for the class.
        time_per_token: the timestep has an entry for each token, as in Wan 2.2 TI2V (`expand_timesteps`).
    Raises: ValueError: diffusers has no such class, its inputs are not known, or configuration or size do not fit.
    """
    import diffusers

    if not hasattr(diffusers, kind):
        raise ValueError(f"diffusers has no class {kind}: use one of {', '.join(EXAMPLES)}")
    if kind not in EXAMPLES:
        raise ValueError(
            f"the inputs of {kind} are not known (known: {', '.join(EXAMPLES)}). Use model=<file.py> with two "
            "functions: model() makes the model, inputs() returns the arguments of its forward"
        )
    example, built = EXAMPLES[kind], getattr(diffusers, kind)
    if compression is not None:
        example = dataclasses.replace(example, space=compression[0], time=compression[1] or example.time)
    try:
        with torch.device("meta"):
            values = dict(built.from_config(dict(config)).config)
    except Exception as error:  # from diffusers: the configuration is wrong
        raise ValueError(f"{kind} cannot be built with this configuration: {type(error).__name__}: {error}") from error
    if time_per_token:
        timestep = f"{example.inputs['timestep']} tokens"
        example = dataclasses.replace(example, inputs={**example.inputs, "timestep": timestep})
    values = example.sized(values, _latents(example, size, values))
    return PlannedModel(
        name or kind,
        partial(built.from_config, dict(config)),
        example.make(values, _empty),
        heads_of(values),
        values["tokens"],
        not values.get("guidance_embeds") if guided is None else guided,
    )


def _latents(example: ExampleInputs, size: MediaSize, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in latents. Raises: ValueError: the media cannot be divided into tokens."""
    patch = example.patches(config)[1]
    for side in ("height", "width"):
        if getattr(size, side) < 1 or getattr(size, side) % (example.space * patch):
            raise ValueError(f"{side}={getattr(size, side)} must be a multiple of {example.space * patch}")
    has_frames = example.has("frames")
    is_picture = not example.has("frames", "audio")
    if size.frames < 1 or (size.frames > 1 and is_picture) or (has_frames and (size.frames - 1) % example.time):
        valid = "1: this model makes pictures" if is_picture else f"1 plus a multiple of {example.time}"
        raise ValueError(f"frames={size.frames} must be {valid}")
    return {
        "batch": size.batch,
        "text": size.text,
        "audio": -(-25 * size.frames // 24),  # latents of a second of sound, and frames
        "frames": (size.frames - 1) // example.time + 1,
        "height": size.height // example.space,
        "width": size.width // example.space,
    }


def _empty(kind: str, dims: list[int]) -> Tensor:
    """Return a tensor without values, or with those that a forward may read."""
    match kind:
        case "mask" | "flags":
            return torch.full(dims, kind == "mask")
        case "ones" | "float_mask" | "int_mask":
            return torch.ones(dims, dtype=torch.int64 if kind == "int_mask" else None)
        case "lengths":
            return torch.full(dims[:1], dims[1])
        case "below":
            return torch.empty(dims[1:], dtype=torch.int64, device="meta")
    dtype = {"step": torch.int64, "turns": torch.complex64}.get(kind, torch.get_default_dtype())
    return torch.empty(dims, dtype=dtype, device="meta")


def of_dtype(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs with floating-point tensors of a dtype, also those in lists and dicts."""
    return {**replace(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, dict(inputs))}


Entries = Mapping[str, tuple[str, Mapping[str, Any]]]  # class and configuration of a pipeline's components, by name


def read_components(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Read class and configuration of the components of a pipeline's folder, except `transformer`.

    Raises: ValueError: a file is damaged.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, entry in read_index(folder).items():
        file = folder / name / "config.json"
        if name != "transformer" and isinstance(entry, list) and len(entry) == 2 and file.is_file():
            found[name] = str(entry[1]), read_json(file)
    return found


def components_of(entries: Entries) -> tuple[dict[str, nn.Module], list[str]]:
    """Build the components of a pipeline that have weights, without them.

    Returns: those that are no transformers, by name; a line for each component that is not among them.
    """
    modules, missing = {}, []
    for name, (class_name, config) in entries.items():
        try:
            module = build_component(class_name, config)
        except Exception as error:  # of code that is not ours
            if is_ours(error) and not isinstance(error, ValueError):
                raise
            missing.append(f"{name} ({class_name}): {' '.join(str(error).split())[:200]}")
            continue
        if module is not None and registered_plan(type(module)) is not None:
            missing.append(f"{name} ({class_name}), another transformer")
        elif module is not None:
            modules[name] = module
    return modules, missing


def compression(vae: Any) -> tuple[int, int]:
    """Return pixels of a latent and, for clips, frames of a latent (otherwise 0)."""
    space = getattr(vae, "spatial_compression_ratio", None) or 2 ** (len(vae.config["block_out_channels"]) - 1)
    time = getattr(vae, "temporal_compression_ratio", None) or vae.config.get("scale_factor_temporal") or 4
    is_clip = any(isinstance(x, nn.Conv3d) for x in vae.decoder.modules())
    return int(space), int(time) if is_clip else 0
