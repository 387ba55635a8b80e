"""Adapters (LoRA) of a pipeline's components: state that ranks compare, and fusing into sharded weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_cp.errors import PlanError
from lightning_cp.patching import Around, intercept_method, undo_all


def adapter_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the weights of adapters, without the layers that they adapt."""
    return {x for layer in _adapted(module) for x in _own_parameters(layer)}


def adapter_state(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ranks must have in common: per component the adapters of its layers, and the norms of their weights.

    Weights that accelerate has moved away are left out.
    """
    found = {}
    for name, component in components.items():
        layers = list(_adapted(component)) if isinstance(component, nn.Module) else []
        if layers:
            described = dict.fromkeys(_described(layer) for layer in layers)
            weights = [x.detach() for layer in layers for x in _own_parameters(layer) if not x.is_meta]
            norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in weights]
            state = {"state": " ".join(described), "weights": torch.stack(norms) if norms else None}
            found[f"adapters of {name}"] = state
    return found


def fuse_into_shards(name: str, module: nn.Module) -> None:
    """Let `fuse_lora` and `unfuse_lora` of a module with sharded weights (FSDP2) change each rank's shard.

    New adapters with DoRA are refused: they need the norms of the whole weights.
    """
    if hasattr(module, "add_adapter"):
        intercept_method(module, "add_adapter", _without_dora(name))
    for method in ("fuse_lora", "unfuse_lora"):
        if hasattr(module, method):
            intercept_method(module, method, _with_sharded_deltas(name, module))


def _without_dora(name: str) -> Around:
    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(getattr(x, "use_dora", False) for x in (*args, *kwargs.values())):
            raise _refusal(name, "add_adapter", "DoRA needs the norms of whole weights: add it before the set-up")
        return call(*args, **kwargs)

    return around


def _with_sharded_deltas(name: str, module: nn.Module) -> Around:
    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layers = [layer for layer in _adapted(module) if isinstance(_base_weight(layer), DTensor)]
        if kwargs.get("safe_fusing") or (len(args) > 1 and args[1]):
            raise _refusal(name, "fuse_lora", "safe_fusing=True would replace them: use safe_fusing=False")
        for layer in layers:
            if getattr(layer, "lora_variant", None) or any(getattr(layer, "lora_bias", {}).values()):
                raise _refusal(name, "fuse_lora", "an adapter has DoRA or a bias: fuse it before the set-up")
        undo = [intercept_method(layer, "get_delta_weight", _sharded_like(layer)) for layer in layers]
        try:
            return call(*args, **kwargs)
        finally:
            undo_all(undo)

    return around


def _sharded_like(layer: Any) -> Around:
    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        weight: Any = _base_weight(layer)
        delta = call(*args, **kwargs).to(weight.dtype)
        # Every rank has the whole delta, so nothing is sent.
        return distribute_tensor(delta, weight.device_mesh, weight.placements, src_data_rank=None)

    return around


def _refusal(name: str, method: str, reason: str) -> PlanError:
    return PlanError(f"{name}.{method}: the weights of {name} are sharded (shard={name!r}), and {reason}")


def _adapted(module: nn.Module) -> Iterator[Any]:
    """Yield the layers of peft, which wrap a layer of the model as `base_layer`."""
    return (layer for layer in module.modules() if "base_layer" in layer._modules and hasattr(layer, "active_adapters"))


def _own_parameters(layer: Any) -> list[nn.Parameter]:
    base = {id(x) for x in layer.base_layer.parameters()}
    return [x for x in layer.parameters() if id(x) not in base]


def _base_weight(layer: Any) -> Any:
    return getattr(layer.get_base_layer(), "weight", None)


def _described(layer: Any) -> str:
    scales = dict(sorted(getattr(layer, "scaling", {}).items()))
    is_off = bool(getattr(layer, "disable_adapters", False))
    return f"(active {layer.active_adapters}, merged {layer.merged_adapters}, scales {scales}, disabled {is_off})"
