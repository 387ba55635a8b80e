"""Adapters (LoRA) of a pipeline's components: state that ranks compare, and fusing into sharded weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_cp.engine.meta import whole_shapes
from lightning_cp.errors import PlanError
from lightning_cp.undoable import Around, Undo, intercept_method


def adapter_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the weights of adapters, without the layers that they adapt."""
    return {x for layer in adapted_layers(module) for x in _adapter_weights(layer)}


def adapter_state(components: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the state of the adapters of each component, for a comparison between ranks."""
    states = {}
    for name, component in components.items():
        layers = list(adapted_layers(component)) if isinstance(component, nn.Module) else []
        if layers:
            states[f"adapters of {name}"] = " ".join(dict.fromkeys(_described(layer) for layer in layers))
    return states


def allow_hotswap(module: nn.Module) -> Undo:
    """Let `load_lora_adapter` prepare hot swaps: peft takes a wrapped call for a compiled one, and would refuse."""

    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wrapped = module.__dict__.pop("_compiled_call_impl", None)
        try:
            return call(*args, **kwargs)
        finally:
            if wrapped is not None:
                module.__dict__["_compiled_call_impl"] = wrapped

    return intercept_method(module, "load_lora_adapter", around)


def adapt_stages(pipeline: Any, module: nn.Module, pipe: object) -> Iterator[Undo]:
    """Let adapters be loaded after this rank has freed the blocks of other stages (pipe above 1); refuse to fuse them.

    Each rank loads the adapters of all blocks.
    """
    why = f"with pipe={pipe}, this rank has only the blocks of its stage"

    def refuse(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise PlanError(f"fuse_lora: {why}: call it before parallelize_pipeline")

    def with_shapes(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with whole_shapes(module):
            return call(*args, **kwargs)

    arounds = dict.fromkeys(("load_lora_adapter", "add_adapter"), (_without_whole_weights(why, module), with_shapes))
    for owner, methods in (
        (pipeline, {"load_lora_weights": (with_shapes,)}),
        (module, arounds | {"fuse_lora": (refuse,)}),
    ):
        for name, around in methods.items():
            yield from (intercept_method(owner, name, one) for one in around if hasattr(owner, name))


def adapt_shards(name: str, module: nn.Module) -> None:
    """Let adapters be added to a module with sharded weights (FSDP2), and fused into each rank's shard."""
    why = f"the weights of {name} are sharded (shard={name!r})"
    around = {
        **dict.fromkeys(("load_lora_adapter", "add_adapter"), _without_whole_weights(why, module)),
        "fuse_lora": _fusing_shards(why, module),
    }
    for method in (method for method in around if hasattr(module, method)):
        intercept_method(module, method, around[method])
    _shard_deltas(module)


def _without_whole_weights(why: str, module: Any) -> Around:
    """Wrap a method that adds adapters: refuse those that are computed from whole weights."""

    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for config in (*args, *kwargs.values()):
            _check_config(why, config)
        before = set(getattr(module, "peft_config", {}))
        result = call(*args, **kwargs)
        _shard_deltas(module)
        for adapter in set(getattr(module, "peft_config", {})) - before:
            try:
                _check_config(why, module.peft_config[adapter])
            except PlanError:
                module.delete_adapters(adapter)
                raise
        return result

    return around


def _check_config(why: str, config: Any) -> None:
    """Refuse adapters that are computed from whole weights. Raises: PlanError."""
    if getattr(config, "use_dora", False):
        raise _refusal(why, "DoRA needs the norms of whole weights: add it before parallelize_pipeline")
    start = getattr(config, "init_lora_weights", True)
    if start not in (True, False, "gaussian"):
        raise _refusal(why, f"init_lora_weights={start!r} needs whole weights: add it before parallelize_pipeline")


def _fusing_shards(why: str, module: nn.Module) -> Around:
    """Wrap `fuse_lora`: refuse options and adapters that need whole weights. Raises: PlanError."""

    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layers = [layer for layer in adapted_layers(module) if isinstance(_base_weight(layer), DTensor)]
        if kwargs.get("safe_fusing") or (len(args) > 1 and args[1]):
            raise _refusal(why, "safe_fusing=True would replace them: use safe_fusing=False")
        for layer in layers:
            if getattr(layer, "lora_variant", None) or any(getattr(layer, "lora_bias", {}).values()):
                raise _refusal(why, "an adapter has DoRA or a bias: fuse it before parallelize_pipeline")
        return call(*args, **kwargs)

    return around


def _shard_deltas(module: nn.Module) -> None:
    """Make each adapted layer compute its LoRA delta as a DTensor, so that it can be merged into a shard."""
    for layer in adapted_layers(module):
        if isinstance(_base_weight(layer), DTensor) and "get_delta_weight" not in layer.__dict__:
            intercept_method(layer, "get_delta_weight", _sharded_like(layer))


def _sharded_like(layer: Any) -> Around:
    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        weight: Any = _base_weight(layer)
        delta = call(*args, **kwargs).detach().to(weight.dtype)
        # Every rank has the whole delta, so nothing is sent.
        return distribute_tensor(delta, weight.device_mesh, weight.placements, src_data_rank=None)

    return around


def _refusal(why: str, reason: str) -> PlanError:
    return PlanError(f"{why}, and {reason}")


def adapted_layers(module: nn.Module) -> Iterator[Any]:
    """Yield the layers of peft, which wrap a layer of the model as `base_layer`."""
    return (layer for layer in module.modules() if "base_layer" in layer._modules and hasattr(layer, "active_adapters"))


def _adapter_weights(layer: Any) -> list[nn.Parameter]:
    base = {id(x) for x in layer.base_layer.parameters()}
    return [x for x in layer.parameters() if id(x) not in base]


def _base_weight(layer: Any) -> Any:
    return getattr(layer.get_base_layer(), "weight", None)


def _described(layer: Any) -> str:
    scales = dict(sorted(getattr(layer, "scaling", {}).items()))
    is_off = bool(getattr(layer, "disable_adapters", False))
    return f"(active {layer.active_adapters}, merged {layer.merged_adapters}, scales {scales}, disabled {is_off})"
