"""Adapters (LoRA) of a pipeline's components: their weights, the state that ranks compare, and swaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_cp.patching import Undo, intercept_method


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


def allow_hotswap(module: nn.Module) -> Undo:
    """Let `load_lora_adapter` prepare swaps: peft refuses models with a wrapped call, as if they were compiled."""

    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wrapped = module.__dict__.pop("_compiled_call_impl", None)
        try:
            return call(*args, **kwargs)
        finally:
            if wrapped is not None:
                module.__dict__["_compiled_call_impl"] = wrapped

    return intercept_method(module, "load_lora_adapter", around)


def _adapted(module: nn.Module) -> Iterator[Any]:
    """Yield the layers of peft, which wrap a layer of the model as `base_layer`."""
    return (layer for layer in module.modules() if "base_layer" in layer._modules and hasattr(layer, "active_adapters"))


def _own_parameters(layer: Any) -> list[nn.Parameter]:
    base = {id(x) for x in layer.base_layer.parameters()}
    return [x for x in layer.parameters() if id(x) not in base]


def _described(layer: Any) -> str:
    scales = dict(sorted(getattr(layer, "scaling", {}).items()))
    is_off = bool(getattr(layer, "disable_adapters", False))
    return f"(active {layer.active_adapters}, merged {layer.merged_adapters}, scales {scales}, disabled {is_off})"
