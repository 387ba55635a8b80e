"""Placement of a pipeline's weights: checks of offloading and device maps; sharding over ranks (FSDP2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_cp.comm.agree import text_of
from lightning_cp.compat.diffusers_names import has_hook, hooks_of, register_block_subclass
from lightning_cp.compat.torch_names import is_traceable_wrapper_subclass
from lightning_cp.engine.caches import CACHES
from lightning_cp.engine.caches.table import cache_of
from lightning_cp.errors import PlanError
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines.adapters import adapt_shards, adapter_parameters
from lightning_cp.undoable import intercept_calls, intercept_method

# Methods that need whole weights or the original classes of the blocks. Adapters of transformers work (adapters.py).
_REFUSED = ("compile_repeated_blocks",)
_REFUSED_IN_ENCODERS = ("load_adapter", "add_adapter", *_REFUSED)


def is_vae(module: object) -> bool:
    """Return True if a component encodes and decodes latents."""
    return isinstance(module, nn.Module) and hasattr(module, "decoder") and hasattr(module, "decode")


def sampling_device(ranks: SampleGroups) -> torch.device:
    """Return the device on which this rank computes."""
    mesh = ranks.context.mesh
    kind = mesh.device_type if mesh is not None else "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def check_placement(
    pipe: Any,
    components: Mapping[str, Any],
    transformers: Mapping[str, nn.Module],
    *,
    shard: Collection[str],
    stages: str,
) -> None:
    """Check that the placement of weights by diffusers is compatible with ours. Called at set-up and before every call.

    Offloading (of models, groups or layers), layerwise casting and quantised weights work unchanged: tokens are
    sharded, weights stay in place.

    Args:
        shard: names of the components that we shard over ranks.
        stages: setting of `parallelize_pipeline`; we move components unless it is "together".
    Raises: PlanError: a component on several devices, a component replaced after set-up, a component that both
        diffusers (or accelerate) and lightning_cp move, weights that cannot be sharded, SeaCache with sharded weights.
    """
    kind = type(pipe).__name__
    pipeline_devices = _mapped_devices(pipe)
    for name, module in components.items():
        devices = _mapped_devices(module) | pipeline_devices
        if len(devices) > 1:
            raise PlanError(
                f"device_map puts {kind}.{name} on {sorted(devices)}, but each rank uses one device: load it without "
                "device_map and move it to the rank's device; if it does not fit, set shard=[...]"
            )
        setting = f"shard={name!r}" if name in shard else f"stages={stages!r}" if stages != "together" else ""
        mover = _mover(module) if setting else None
        if mover is not None:
            raise PlanError(
                f"{mover[0]} moves the weights of {kind}.{name}, and so does {setting}: use only one of them (to "
                f"disable it: {mover[1]})"
            )
        if name in shard:
            _check_weights(name, module)
    for name, module in transformers.items():
        if pipe.components.get(name) is not module:
            raise PlanError(
                f"{kind}.{name} was replaced after parallelize_pipeline, and the new one is not parallel: call "
                "unparallelize_pipeline, replace it, then call parallelize_pipeline again. (To compile it, call "
                f"{name}.compile() in place of torch.compile({name}))"
            )
        if name in shard and any(cache_of(hook) is CACHES["sea_cache"] for hook in _hooks(module)):
            raise PlanError(
                f"SeaCache on {kind}.{name} computes every step if weights are sharded (shard={name!r}): use another "
                f"step cache, or call {name}.disable_cache()"
            )


def _mapped_devices(thing: Any) -> set[str]:
    """Return the devices in a pipeline's or model's `device_map`, which may also be the name of a single device."""
    device_map = getattr(thing, "hf_device_map", None) or {}
    return {str(device) for device in device_map.values()} if isinstance(device_map, Mapping) else {str(device_map)}


def _hooks(module: nn.Module) -> Iterator[Any]:
    return (hook for inner in module.modules() for _, hook in hooks_of(inner))


def _mover(module: object) -> tuple[str, str] | None:
    """Return the feature of diffusers or accelerate that moves a component's weights, and how to disable it."""
    if not isinstance(module, nn.Module):
        return None
    if any(hasattr(inner, "_hf_hook") for inner in module.modules()):
        return "accelerate (model or sequential CPU offload, or device_map)", "pipe.remove_all_hooks()"
    if has_hook(module, "offload"):
        return "group offloading", "load it again without enable_group_offload"
    return None


def layers_to_shard(
    components: Mapping[str, Any], names: Sequence[str], transformers: Mapping[str, nn.Module], ranks: SampleGroups
) -> dict[str, list[nn.Module]]:
    """Find the layers of each component that `shard_layers` can shard. Changes nothing.

    Raises: PlanError: a component that does not exist, has no layers, cannot be sharded, or is sharded already.
    """
    for name, module in components.items():
        if isinstance(module, nn.Module) and any(isinstance(inner, FSDPModule) for inner in module.modules()):
            raise PlanError(f"{name} is already sharded (FSDP): load it unsharded, and set shard=[{name!r}]")
    by_component: dict[str, list[nn.Module]] = {}
    for name in names:
        module = components.get(name)
        if not isinstance(module, nn.Module):
            names_of_modules = sorted(key for key, x in components.items() if isinstance(x, nn.Module))
            raise PlanError(f"shard={name!r} is not valid: must be one of the components {names_of_modules}")
        _check_can_shard(name, module)
        if name in transformers and ranks.context.context_size == 1 < ranks.sample.context_size:
            raise PlanError(
                f"shard={name!r}: a transformer is sharded over the ranks that compute the same branch of guidance, "
                f"but with cfg={ranks.cfg} and ring x ulysses = 1 each branch has one rank: increase ring or ulysses"
            )
        others = {layer for layers in by_component.values() for layer in layers}
        by_component[name] = [layer for layer in dict.fromkeys(layers_with_weights(module)) if layer not in others]
        if not layers_with_weights(module):
            raise PlanError(f"shard={name!r}: {type(module).__name__} has no lists of layers to shard")
    return by_component


def _check_can_shard(name: str, module: nn.Module) -> None:
    if is_vae(module):
        raise PlanError(
            f"shard={name!r}: a {type(module).__name__} cannot be sharded, because ranks decode different tiles or "
            f"rows: use vae=True to share its work, and {name}.enable_tiling() to limit its memory"
        )
    if any(x.is_meta for x in module.parameters()):
        raise PlanError(f"shard={name!r}: its weights are on the meta device: load them first")
    _check_weights(name, module)


def _check_weights(name: str, module: nn.Module) -> None:
    if any(_is_quantised(x) for x in module.parameters()):
        raise PlanError(f"shard={name!r}: quantised weights cannot be sharded: leave {name} out of shard")
    if has_hook(module, "cast"):
        raise PlanError(
            f"shard={name!r}: weights with layerwise casting cannot be sharded: leave {name} out of "
            "shard, or load it without enable_layerwise_casting"
        )


def _is_quantised(x: nn.Parameter) -> bool:
    kind: Any = type(x)
    return not x.is_floating_point() or (is_traceable_wrapper_subclass(x) and not issubclass(kind, DTensor))


def shard_layers(
    by_component: Mapping[str, Sequence[nn.Module]],
    components: Mapping[str, Any],
    transformers: Mapping[str, nn.Module],
    ranks: SampleGroups,
) -> None:
    """Shard the weights of layers over ranks (FSDP2): each layer is all-gathered only while it computes.

    A transformer is sharded over its context group, because these ranks run the same blocks at the same time. Other
    components are sharded over all ranks that share a sample. Weights outside the layers (embeddings, projections) stay
    whole, and so do adapters and weights in another dtype than the main dtype of their layer (fp32 norms). Each
    component is then moved to the rank's device.
    """
    for name, layers in by_component.items():
        groups = ranks.context if name in transformers else ranks.sample
        if groups.context is None:
            continue
        device = sampling_device(ranks)
        mesh = _mesh_over(groups, device.type)
        for layer in layers:
            whole = _other_dtypes(layer) | adapter_parameters(layer)  # adapters can then be changed as in one process
            kind = type(layer)
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
            register_block_subclass(kind, type(layer))
        components[name].to(device)
        gather_ahead(components[name], layers, mesh)
        _refuse_changes(name, components[name], _REFUSED if name in transformers else _REFUSED_IN_ENCODERS)
        if name in transformers:
            adapt_shards(name, components[name])


def gather_ahead(component: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Let the sharded layers of a component be gathered while the layer before computes.

    FSDP2 does this for the parts of one root module. The component cannot be the root, because its class would change,
    so its calls run inside of another module that also holds the layers.
    """
    root = _Layers(layers)
    fully_shard(root, mesh=mesh, ignored_params=set(root.parameters()))
    root(lambda: None)  # now it is the root, also if a layer is called alone before the component
    intercept_calls(component, lambda call, args, kwargs: root(partial(call, *args, **kwargs)))


class _Layers(nn.Module):
    """Layers of a component, and a forward that calls a function in which they run."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def _refuse_changes(name: str, module: nn.Module, methods: Sequence[str]) -> None:
    """Make methods raise that do not work with sharded weights."""
    for method in (method for method in methods if hasattr(module, method)):
        message = (
            f"{name}.{method}: the weights of {name} are sharded (shard={name!r}): call it before parallelize_pipeline"
        )

        def refuse(*_: object, message: str = message) -> NoReturn:
            raise PlanError(message)

        intercept_method(module, method, refuse)


def mark_unusable(
    pipe: Any, by_component: Mapping[str, Sequence[nn.Module]], staged: Collection[str], error: BaseException
) -> None:
    """Make a pipeline raise at every call if some of its layers were sharded, or weights freed, before `error`.

    Args: by_component: layers to shard. staged: names of components with blocks in stages.
    """
    is_sharded = any(isinstance(layer, FSDPModule) for layers in by_component.values() for layer in layers)
    freed = [name for name in staged if any(not x.numel() for x in pipe.components[name].parameters())]
    if not is_sharded and not freed:
        return
    state = "only partly sharded" if is_sharded else f"without some weights of {', '.join(freed)}"
    setting = f" with shard={list(by_component)}" if is_sharded else ""
    message = (
        f"this {type(pipe).__name__} is {state}, because parallelize_pipeline failed{setting} "
        f"({text_of(error)}): load it again"
    )

    def refuse(*_: object) -> NoReturn:
        raise PlanError(message)

    intercept_calls(pipe, refuse)


def layers_with_weights(module: nn.Module) -> list[nn.Module]:
    """Return the layers in all lists of a module that have weights."""
    if isinstance(module, nn.ModuleList):
        return [layer for layer in module if any(True for _ in layer.parameters())]
    return [layer for child in module.children() for layer in layers_with_weights(child)]


def _other_dtypes(layer: nn.Module) -> set[nn.Parameter]:
    """Return the parameters in other dtypes than the layer's main one (by bytes): FSDP shards one dtype together."""
    sizes: Counter[torch.dtype] = Counter()
    for x in layer.parameters():
        sizes[x.dtype] += x.numel() * x.element_size()
    (main, _), *_ = sizes.most_common(1)
    return {x for x in layer.parameters() if x.dtype != main}


def _mesh_over(groups: MeshGroups, device_type: str) -> DeviceMesh:
    assert groups.context is not None, "only several ranks shard weights"
    ranks = dist.get_process_group_ranks(groups.context)
    # By this axis name peft recognises FSDP, where layers compute with gathered weights.
    return DeviceMesh.from_group(groups.context, device_type, mesh=ranks, mesh_dim_names=("fsdp",))
