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
        inputs: for each argument its kind and its dims, or a value. A dim is a number, a size (batch, text, tokens,
            audio, frames, height, width; the last three in latents), an entry of the model's configuration, or a sum of
            those. Kinds: float, int: without values. ones, mask (bool): with values. pair: two of float. each: a list
            of float, one for each sample. grid: the patches of each picture as numbers. ranges: the numbers below each
            dim, as one tensor, or several. number: the dim itself.
        only_if: entry of the configuration without which an argument is left out.
        space, time: pixels and frames of a latent.
        patch: latents of a token, in height and in width; None: the entry `patch_size` of the configuration.
    """

    inputs: Mapping[str, Any]
    only_if: Mapping[str, str] = field(default_factory=dict)
    space: int = 8
    time: int = 4
    patch: int | None = None


_PACKED = {
    "hidden_states": "float batch tokens in_channels",
    "encoder_hidden_states": "float batch text joint_attention_dim",
    "timestep": "float batch",
}
_IDS = {"img_ids": "float tokens 3", "txt_ids": "float text 3"}
_POOLED = {"pooled_projections": "float batch pooled_projection_dim"}
_SCALE = {"guidance": "float batch"}
_MASK = {"encoder_attention_mask": "mask batch text"}
_PICTURE = {"hidden_states": "float batch in_channels height width", "timestep": "float batch"}
_CLIP = {"hidden_states": "float batch in_channels frames height width", "timestep": "int batch"}
_WAN = InputsOfClass({**_CLIP, "encoder_hidden_states": "float batch text text_dim"})
_COGVIEW = InputsOfClass(
    {
        **_PICTURE,
        "encoder_hidden_states": "float batch text text_embed_dim",
        **dict.fromkeys(("original_size", "target_size", "crop_coords"), "int batch 2"),
    }
)
_GUIDED = {"guidance": "guidance_embeds"}
INPUTS = {
    "AnyFlowTransformer3DModel": InputsOfClass(
        {
            "hidden_states": "float batch frames in_channels height width",
            "encoder_hidden_states": "float batch text text_dim",
            "timestep": "float batch frames",
            "r_timestep": "float batch frames",
        }
    ),
    "AuraFlowTransformer2DModel": InputsOfClass(
        {**_PICTURE, "encoder_hidden_states": "float batch text joint_attention_dim"}
    ),
    "BriaTransformer2DModel": InputsOfClass({**_PACKED, **_IDS, **_SCALE}, _GUIDED, patch=2),
    "ChromaTransformer2DModel": InputsOfClass({**_PACKED, **_IDS}, patch=2),
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": InputsOfClass(
        {
            "hidden_states": "float batch frames in_channels height width",
            "encoder_hidden_states": "float batch text text_embed_dim",
            "timestep": "int batch",
            "image_rotary_emb": "pair tokens attention_head_dim",
        },
        {"image_rotary_emb": "use_rotary_positional_embeddings"},
    ),
    "CogView3PlusTransformer2DModel": _COGVIEW,
    "CogView4Transformer2DModel": _COGVIEW,
    "CosmosTransformer3DModel": InputsOfClass(
        {
            **_CLIP,
            "encoder_hidden_states": "float batch text text_embed_dim",
            "timestep": "float batch",
            "padding_mask": "ones 1 1 height width",
            "fps": 24,
        },
        {"padding_mask": "concat_padding_mask"},
    ),
    "EasyAnimateTransformer3DModel": InputsOfClass(
        {**_CLIP, "encoder_hidden_states": "float batch text text_embed_dim"}
    ),
    "Flux2Transformer2DModel": InputsOfClass(
        {**_PACKED, **_SCALE, "img_ids": "float batch tokens 4", "txt_ids": "float batch text 4"}, _GUIDED, patch=2
    ),
    "Flux3Transformer2DModel": InputsOfClass(
        {**_PACKED, "img_ids": "float tokens 4", "txt_ids": "float text 4"}, patch=2
    ),
    "FluxTransformer2DModel": InputsOfClass({**_PACKED, **_POOLED, **_IDS, **_SCALE}, _GUIDED, patch=2),
    "HunyuanVideoTransformer3DModel": InputsOfClass(
        {**_CLIP, "encoder_hidden_states": "float batch text text_embed_dim", **_MASK, **_POOLED, **_SCALE}, _GUIDED
    ),
    "Kandinsky5Transformer3DModel": InputsOfClass(
        {
            "hidden_states": "float batch frames height width in_visual_dim",
            "encoder_hidden_states": "float batch text in_text_dim",
            "pooled_projections": "float batch in_text_dim2",
            "timestep": "float batch",
            "visual_rope_pos": "ranges frames rows columns",
            "text_rope_pos": "ranges text",
        }
    ),
    "Krea2Transformer2DModel": InputsOfClass(
        {
            "hidden_states": "float batch tokens in_channels",
            "encoder_hidden_states": "float batch text num_text_layers text_hidden_dim",
            "timestep": "float batch",
            "position_ids": "float text+tokens 3",
            **_MASK,
        },
        patch=2,
    ),
    "LTX2VideoTransformer3DModel": InputsOfClass(
        {
            "hidden_states": "float batch tokens in_channels",
            "audio_hidden_states": "float batch audio audio_in_channels",
            "encoder_hidden_states": "float batch text caption_channels",
            "audio_encoder_hidden_states": "float batch text caption_channels",
            "timestep": "int batch",
            **_MASK,
            "audio_encoder_attention_mask": "mask batch text",
            **{"num_frames": "number frames", "height": "number height", "width": "number width"},
            **{"audio_num_frames": "number audio", "fps": 24.0},
        },
        space=32,
        time=8,
    ),
    "LTXVideoTransformer3DModel": InputsOfClass(
        {
            "hidden_states": "float batch tokens in_channels",
            "encoder_hidden_states": "float batch text caption_channels",
            "timestep": "int batch",
            **_MASK,
            **{"num_frames": "number frames", "height": "number height", "width": "number width"},
        },
        space=32,
        time=8,
    ),
    "LongCatImageTransformer2DModel": InputsOfClass({**_PACKED, **_IDS}, patch=2),
    "Lumina2Transformer2DModel": InputsOfClass(
        {**_PICTURE, "encoder_hidden_states": "float batch text cap_feat_dim", **_MASK}
    ),
    "MochiTransformer3DModel": InputsOfClass(
        {**_CLIP, "encoder_hidden_states": "float batch text text_embed_dim", **_MASK}, time=6
    ),
    "MotifVideoTransformer3DModel": InputsOfClass(
        {**_CLIP, "encoder_hidden_states": "float batch text text_embed_dim", **_MASK}
    ),
    "OvisImageTransformer2DModel": InputsOfClass({**_PACKED, **_IDS}, patch=2),
    "PRXTransformer2DModel": InputsOfClass({**_PICTURE, "encoder_hidden_states": "float batch text context_in_dim"}),
    "PixArtTransformer2DModel": InputsOfClass(
        {
            **_PICTURE,
            "encoder_hidden_states": "float batch text caption_channels",
            **_MASK,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }
    ),
    "QwenImageTransformer2DModel": InputsOfClass({**_PACKED, **_SCALE, "img_shapes": "grid batch"}, _GUIDED, patch=2),
    "SD3Transformer2DModel": InputsOfClass(
        {**_PICTURE, "encoder_hidden_states": "float batch text joint_attention_dim", **_POOLED}
    ),
    "SanaTransformer2DModel": InputsOfClass(
        {**_PICTURE, "encoder_hidden_states": "float batch text caption_channels", **_MASK, **_SCALE}, _GUIDED, space=32
    ),
    "SanaVideoTransformer3DModel": InputsOfClass(
        {**_CLIP, "encoder_hidden_states": "float batch text caption_channels", **_MASK}
    ),
    "SkyReelsV2Transformer3DModel": _WAN,
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": InputsOfClass(
        {**_WAN.inputs, "control_hidden_states": "float batch vace_in_channels frames height width"}
    ),
    "ZImageTransformer2DModel": InputsOfClass(
        {"x": "each in_channels 1 height width", "t": "float batch", "cap_feats": "each text cap_feat_dim"}, patch=2
    ),
}
_HEADS = ("num_attention_heads", "num_heads", "n_heads")  # entries of configurations


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
        argument: _input(text, {**values, **sizes})
        for argument, text in spec.inputs.items()
        if argument not in spec.only_if or values.get(spec.only_if[argument])
    }
    return PlannedModel(
        name or kind,
        partial(built.from_config, dict(config)),
        inputs,
        next((values[name] for name in _HEADS if name in values), None),
        sizes["tokens"],
        not values.get("guidance_embeds") if guided is None else guided,
    )


def _sizes(spec: InputsOfClass, size: MediaSize, values: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in latents. Raises: ValueError: the media cannot be divided into tokens."""
    configured = values.get("patch_size", 1)
    time_patch, *_, patch = configured if isinstance(configured, (list, tuple)) else (1, configured)
    patch, time_patch = spec.patch or patch, values.get("patch_size_t") or time_patch
    for side in ("height", "width"):
        if getattr(size, side) < 1 or getattr(size, side) % (spec.space * patch):
            raise ValueError(f"{side}={getattr(size, side)} must be a multiple of {spec.space * patch}")
    has_frames = any("frames" in str(text).split() for text in spec.inputs.values())
    if size.frames < 1 or (size.frames > 1 and not has_frames) or (size.frames - 1) % spec.time:
        valid = f"1 plus a multiple of {spec.time}" if has_frames else "1: this model makes pictures"
        raise ValueError(f"frames={size.frames} must be {valid}")
    frames, height, width = (size.frames - 1) // spec.time + 1, size.height // spec.space, size.width // spec.space
    rows, columns = height // patch, width // patch
    return {
        "batch": size.batch,
        "text": size.text,
        "tokens": -(-frames // time_patch) * rows * columns,
        "audio": -(-25 * size.frames // 24),  # latents of a second of sound, and frames
        "frames": frames,
        "height": height,
        "width": width,
        "rows": rows,
        "columns": columns,
    }


def _input(text: Any, values: Mapping[str, Any]) -> Any:
    if not isinstance(text, str):
        return text
    kind, *dims = text.split()
    shape = [sum(int(x) if x.isdigit() else values[x] for x in dim.split("+")) for dim in dims]
    match kind:
        case "number":
            return shape[0]
        case "grid":
            return [[(1, values["rows"], values["columns"])]] * prod(shape)
        case "ranges":
            ranges = tuple(map(torch.arange, shape))
            return ranges if len(ranges) > 1 else ranges[0]
        case "ones" | "mask":
            return torch.ones(shape, dtype=torch.bool if kind == "mask" else None)
    dtype = torch.int64 if kind == "int" else torch.get_default_dtype()
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return [empty] * values["batch"] if kind == "each" else (empty, empty) if kind == "pair" else empty


def of_dtype(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs with floating-point tensors of a dtype, also those in lists and dicts."""
    changed = replace(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, dict(inputs))
    return {**changed}
