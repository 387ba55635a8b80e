"""Models to plan for: a class of diffusers with a configuration, and inputs without values for a size of media."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.nest import replace


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

    height: int
    width: int
    frames: int = 1
    text: int = 512
    batch: int = 1


@dataclass(frozen=True)
class InputsOfClass:
    """Inputs of a class as data.

    Attributes:
        inputs: for each argument its kind and its dims. A dim is a number, a size (batch, text, tokens, frames, height,
            width; the last three in latents), or an entry of the model's configuration. Kinds: float, int: without
            values. ones: with values. grid: the patches of each picture as numbers.
        only_if: entry of the configuration without which an argument is left out.
        space, time: pixels and frames of a latent.
        patch: latents of a token, in height and in width.
    """

    inputs: Mapping[str, str]
    only_if: Mapping[str, str] = field(default_factory=dict)
    space: int = 8
    time: int = 4
    patch: int = 2


_PACKED = {
    "hidden_states": "float batch tokens in_channels",
    "encoder_hidden_states": "float batch text joint_attention_dim",
    "timestep": "float batch",
    "guidance": "float batch",
}
_CLIP = {"hidden_states": "float batch in_channels frames height width", "timestep": "int batch"}
_GUIDED = {"guidance": "guidance_embeds"}
INPUTS = {
    "FluxTransformer2DModel": InputsOfClass(
        {
            **_PACKED,
            "pooled_projections": "float batch pooled_projection_dim",
            "img_ids": "float tokens 3",
            "txt_ids": "float text 3",
        },
        _GUIDED,
    ),
    "Flux2Transformer2DModel": InputsOfClass(
        {**_PACKED, "img_ids": "float batch tokens 4", "txt_ids": "float batch text 4"}, _GUIDED
    ),
    "QwenImageTransformer2DModel": InputsOfClass({**_PACKED, "img_shapes": "grid batch"}, _GUIDED),
    "SD3Transformer2DModel": InputsOfClass(
        {
            "hidden_states": "float batch in_channels height width",
            "encoder_hidden_states": "float batch text joint_attention_dim",
            "pooled_projections": "float batch pooled_projection_dim",
            "timestep": "float batch",
        }
    ),
    "WanTransformer3DModel": InputsOfClass({**_CLIP, "encoder_hidden_states": "float batch text text_dim"}),
    "HunyuanVideoTransformer3DModel": InputsOfClass(
        {
            **_CLIP,
            "encoder_hidden_states": "float batch text text_embed_dim",
            "encoder_attention_mask": "ones batch text",
            "pooled_projections": "float batch pooled_projection_dim",
            "guidance": "float batch",
        },
        _GUIDED,
    ),
}


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
        raise ValueError(f"diffusers has no class {kind}: use one of {', '.join(INPUTS)}")
    if kind not in INPUTS:
        raise ValueError(
            f"the inputs of {kind} are not known (known: {', '.join(INPUTS)}). Use model=<file.py> with two functions: "
            "model() makes the model, inputs() returns the arguments of its forward"
        )
    spec, built = INPUTS[kind], getattr(diffusers, kind)
    if compression is not None:
        spec = dataclasses.replace(spec, space=compression[0], time=compression[1] or spec.time)
    try:
        with torch.device("meta"):
            values = dict(built.from_config(dict(config)).config)
    except Exception as error:  # from diffusers: the configuration is wrong
        raise ValueError(f"{kind} cannot be built with this configuration: {type(error).__name__}: {error}") from error
    if time_per_token:
        spec = dataclasses.replace(spec, inputs={**spec.inputs, "timestep": f"{spec.inputs['timestep']} tokens"})
    sizes = _sizes(spec, size, values)
    inputs = {
        argument: _input(text, {**values, **sizes}, sizes)
        for argument, text in spec.inputs.items()
        if argument not in spec.only_if or values.get(spec.only_if[argument])
    }
    return PlannedModel(
        name or kind,
        partial(built.from_config, dict(config)),
        inputs,
        values.get("num_attention_heads"),
        sizes["tokens"],
        not values.get("guidance_embeds") if guided is None else guided,
    )


def _sizes(spec: InputsOfClass, size: MediaSize, values: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in latents. Raises: ValueError: the media cannot be divided into tokens."""
    for side in ("height", "width"):
        if getattr(size, side) < 1 or getattr(size, side) % (spec.space * spec.patch):
            raise ValueError(f"{side}={getattr(size, side)} must be a multiple of {spec.space * spec.patch}")
    has_frames = any("frames" in text.split() for text in spec.inputs.values())
    if size.frames < 1 or (size.frames > 1 and not has_frames) or (size.frames - 1) % spec.time:
        valid = f"1 plus a multiple of {spec.time}" if has_frames else "1: this model makes pictures"
        raise ValueError(f"frames={size.frames} must be {valid}")
    frames, height, width = (size.frames - 1) // spec.time + 1, size.height // spec.space, size.width // spec.space
    tokens = frames * (height // spec.patch) * (width // spec.patch)
    return {
        "batch": size.batch,
        "text": size.text,
        "tokens": tokens,
        "frames": frames,
        "height": height,
        "width": width,
        "patch": spec.patch,
    }


def _input(text: str, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    kind, *dims = text.split()
    shape = [int(x) if x.isdigit() else values[x] for x in dims]
    if kind == "grid":
        grid = (1, sizes["height"] // sizes["patch"], sizes["width"] // sizes["patch"])
        return [[grid]] * prod(shape)
    if kind == "ones":
        return torch.ones(shape)
    dtype = torch.int64 if kind == "int" else torch.get_default_dtype()
    return torch.empty(shape, dtype=dtype, device="meta")


def of_dtype(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs with floating-point tensors of a dtype, also those in lists and dicts."""
    changed = replace(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, dict(inputs))
    return {**changed}
