"""The components of a pipeline besides the planned transformer, without weights, from their configurations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_cp.files import read_json
from lightning_cp.pipeline_folder.index import read_index
from lightning_cp.pipelines.placement.sharding import is_vae
from lightning_cp.planning.dry_run import is_ours
from lightning_cp.planning.models import MediaSize
from lightning_cp.plans import registered_plan

Stage = Literal["encode", "denoise", "decode"]


@dataclass(frozen=True)
class Component:
    """A component of a pipeline.

    Attributes:
        name: name in the pipeline.
        stage: stage that calls it.
        module: the component, on the meta device.
        inputs: arguments of the call. Tensors on the meta device have no values. None: only the weights count.
        method: name of the method that is called.
    """

    name: str
    stage: Stage
    module: nn.Module
    inputs: Mapping[str, Any] | None = None
    method: str = "forward"

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of its weights, with this dtype, and of its buffers."""
        weights = sum(x.numel() for x in self.module.parameters()) * dtype.itemsize
        return weights + sum(x.numel() * x.element_size() for x in self.module.buffers())


@dataclass(frozen=True)
class Pipeline:
    """What a sample needs besides the planned transformer.

    Attributes:
        components: the other components with weights.
        steps: number of denoising steps that the pipeline has by default; None: not known.
        uncounted: components that cannot be built, each with its class.
    """

    components: tuple[Component, ...]
    steps: int | None = None
    uncounted: tuple[str, ...] = ()


def read_components(folder: Path) -> tuple[str, dict[str, tuple[str, dict[str, Any]]]]:
    """Read the class of a pipeline's folder, and class and configuration of its components except `transformer`.

    Raises: ValueError: a file is damaged.
    """
    index = read_index(folder)
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, entry in index.items():
        file = folder / name / "config.json"
        if name != "transformer" and isinstance(entry, list) and len(entry) == 2 and file.is_file():
            found[name] = str(entry[1]), read_json(file)
    return str(index.get("_class_name")), found


def make_pipeline(kind: str | None, entries: Mapping[str, tuple[str, Mapping[str, Any]]], size: MediaSize) -> Pipeline:
    """Return the components of a pipeline.

    Args:
        kind: class of the pipeline; None: not known.
        entries: class and configuration of each component, by name.
    """
    import diffusers

    components, uncounted = [], []
    for name, (class_name, config) in entries.items():
        try:
            module = _build(class_name, config)
        except Exception as error:  # of code that is not ours
            if is_ours(error) and not isinstance(error, ValueError):
                raise
            uncounted.append(f"{name} ({class_name}): {' '.join(str(error).split())[:200]}")
            continue
        if module is not None:
            components.append(_component(name, module, size))
    call = getattr(getattr(diffusers, kind or "", None), "__call__", None)  # noqa: B004
    steps = None if call is None else inspect.signature(call).parameters.get("num_inference_steps")
    default = None if steps is None else steps.default
    return Pipeline(tuple(components), default if isinstance(default, int) else None, tuple(uncounted))


def _build(class_name: str, config: Mapping[str, Any]) -> nn.Module | None:
    """Build a component on the meta device; None if its class has no weights. Raises: ValueError: unknown class."""
    import diffusers
    import transformers

    kind: Any = getattr(diffusers, class_name, None) or getattr(transformers, class_name, None)
    if not isinstance(kind, type):
        raise ValueError("neither diffusers nor transformers has this class")
    if not issubclass(kind, nn.Module):
        return None
    named: Any = kind
    with torch.device("meta"):
        if issubclass(kind, diffusers.ModelMixin):
            module: nn.Module = named.from_config({key: x for key, x in config.items() if not key.startswith("_")})
        else:
            module = named(named.config_class.from_dict(dict(config)))
    return module.eval()


def _component(name: str, module: Any, size: MediaSize) -> Component:
    if registered_plan(type(module)) is not None:
        return Component(name, "denoise", module)
    if is_vae(module):
        return Component(
            name, "decode", module, {"z": torch.empty(latent_shape(module, size), device="meta")}, "decode"
        )
    return Component(name, "encode", module, _encoder_inputs(module, size))


def compression(vae: Any) -> tuple[int, int]:
    """Return pixels of a latent and, for clips, frames of a latent (otherwise 0)."""
    space = getattr(vae, "spatial_compression_ratio", None) or 2 ** (len(vae.config["block_out_channels"]) - 1)
    time = getattr(vae, "temporal_compression_ratio", None) or vae.config.get("scale_factor_temporal") or 4
    is_clip = any(isinstance(x, nn.Conv3d) for x in vae.decoder.modules())
    return int(space), int(time) if is_clip else 0


def compression_of(entries: Mapping[str, tuple[str, Mapping[str, Any]]]) -> tuple[int, int] | None:
    """Return the compression of a pipeline's VAE; None: it has none, or one of an unknown class.

    Args: entries: see `make_pipeline`.
    """
    if "vae" not in entries:
        return None
    try:
        module = _build(*entries["vae"])
    except Exception as error:  # of code that is not ours; `make_pipeline` reports it
        if is_ours(error) and not isinstance(error, ValueError):
            raise
        return None
    return compression(module) if is_vae(module) else None


def latent_shape(vae: Any, size: MediaSize) -> tuple[int, ...]:
    """Return the shape of the latents that a VAE decodes."""
    space, time = compression(vae)
    channels = vae.config.get("latent_channels") or vae.config["z_dim"]
    frames = [(size.frames - 1) // time + 1] if time else []
    return (size.batch, channels, *frames, size.height // space, size.width // space)


def _encoder_inputs(module: Any, size: MediaSize) -> dict[str, Any] | None:
    """Return the arguments of an encoder, with values, since many read those; None: they are not known."""
    config, arguments = module.config, inspect.signature(module.forward).parameters
    if "input_ids" in arguments:
        tokens = min(size.text, getattr(config, "max_position_embeddings", None) or size.text)
        ids = torch.ones(size.batch, max(tokens, 1), dtype=torch.int64)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": ids.clone()}
        # Pipelines read the layers of language models, and the last output of encoders.
        inputs["output_hidden_states"] = "Encoder" not in type(module).__name__
        return inputs
    if "pixel_values" in arguments and isinstance(getattr(config, "image_size", None), int):
        return {"pixel_values": torch.empty(size.batch, 3, config.image_size, config.image_size, device="meta")}
    return None
