"""The components of a pipeline besides the planned transformer, without weights, and dry runs of their calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_cp.comm.packet import BUFFERS
from lightning_cp.comm.transfer import observing
from lightning_cp.compat.torch_names import fake_tensors
from lightning_cp.config import ContextParallelConfig
from lightning_cp.device_profile import DeviceProfile, assuming
from lightning_cp.files import read_json
from lightning_cp.finetune.pipeline import build_component
from lightning_cp.mesh.groups import MeshGroups, groups_for
from lightning_cp.nest import of_type, replace
from lightning_cp.pipeline_folder import read_index
from lightning_cp.pipelines.placement.sharding import is_vae
from lightning_cp.planning.dry_run import fake_rank, is_ours, new_garbage_only, replace_tensors, without_storage
from lightning_cp.planning.models import MediaSize
from lightning_cp.planning.recorder import Recorder
from lightning_cp.planning.recording import composed, links_of
from lightning_cp.planning.step import Layout, Step
from lightning_cp.plans import registered_plan
from lightning_cp.vae import parallelize_vae

ComponentStage = Literal["encode", "denoise", "decode"]


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
    stage: ComponentStage
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
            module = build_component(class_name, config)
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
        module = build_component(*entries["vae"])
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


@dataclass
class ComponentRuns:
    """The dry runs of components, shared by the layouts with equally many ranks for a sample."""

    device: DeviceProfile
    dtype: torch.dtype
    _steps: dict[tuple[str, int], Step | str] = field(default_factory=dict)

    def run(self, component: Component, *, ranks: int) -> Step | str:
        """Dry-run a call of a component on a rank.

        Returns: the reason in one line if the component cannot be traced. An error in our own code is raised.
        """
        ranks = ranks if component.stage == "decode" else 1
        key = component.name, ranks
        if key not in self._steps:
            try:
                self._steps[key] = dry_run_component(component, ranks, device=self.device, dtype=self.dtype)
            except Exception as error:
                if is_ours(error) and not isinstance(error, (ValueError, RuntimeError)):
                    raise
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                self._steps[key] = f"{component.name} ({type(component.module).__name__}) cannot be traced ({reason})"
        return self._steps[key]


def dry_run_component(
    component: Component, ranks: int, *, device: DeviceProfile, dtype: torch.dtype, rank: int | None = None
) -> Step:
    """Trace a call of a component.

    Args:
        ranks: number of ranks that share it.
        dtype: dtype of weights and inputs.
        rank: the rank that is traced; None: one that has neighbours on both sides, if there is one.
    """
    rank = (1 if ranks > 2 else 0) if rank is None else rank
    with fake_rank(ranks, rank), assuming(device), new_garbage_only():
        groups = groups_for(ContextParallelConfig(ring_degree=ranks))
        BUFFERS.forget()
        module = copy.deepcopy(component.module)
        replace_tensors(module, lambda x: x.to(dtype) if x.is_floating_point() else x, lambda x: x)
        try:
            with fake_tensors(allow_real=True):
                replace_tensors(module, without_storage, without_storage)
                given = dict(component.inputs or {})
                inputs = replace(Tensor, lambda x: without_storage(x.to(dtype)) if x.is_meta else x, given)
                return record_call(module, component.method, inputs, groups)
        finally:
            BUFFERS.forget()


def record_call(module: nn.Module, method: str, inputs: Mapping[str, Any], groups: MeshGroups) -> Step:
    """Run a call without gradients and record it, on tensors with or without storage.

    The result is gathered as if all ranks had as many rows as this one.

    Args: groups: groups of the ranks that share a sample; a VAE is divided over them if its class supports that.
    """
    if method == "decode":
        with suppress(ValueError):  # this class is decoded whole by each rank, as with vae=auto
            parallelize_vae(module, groups)
    recorder = Recorder(links_of(groups))
    for x in (*module.parameters(), *module.buffers()):
        recorder.tracker.add(x, "weights")
    for x in of_type(Tensor, {**inputs}):
        recorder.tracker.add(x, "activations")
    with observing(recorder), recorder, torch.no_grad():
        getattr(module, method)(**inputs)
    recorder.mark("end")
    return composed(Layout(ring=groups.context_size), recorder.segments, {})
