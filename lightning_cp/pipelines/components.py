"""Find the components of a pipeline that denoise, and refuse pipelines that cannot be parallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_cp.engine.apply import installed_on, no_plan_message
from lightning_cp.errors import PlanError
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines.guidance.controlnets import is_controlnet
from lightning_cp.plans import refusal, registered_plan
from lightning_cp.undoable import Undo, set_attribute


def components_of(pipe: Any) -> dict[str, Any]:
    """Return a pipeline's components by name, without the wrapper of `torch.compile(module)`.

    Raises: TypeError: `pipe` is not a pipeline.
    """
    components = getattr(pipe, "components", None)
    if not isinstance(components, Mapping) or not callable(pipe):
        raise TypeError(f"pipe must be a diffusers pipeline, not {type(pipe).__name__}")
    return {name: getattr(x, "_orig_mod", x) for name, x in components.items()}


def compile_in_place(pipe: Any) -> Iterator[Undo]:
    """Replace each component that is `torch.compile(module)` by the module, compiled as `module.compile()` does."""
    for name, wrapper in pipe.components.items():
        module = getattr(wrapper, "_orig_mod", None)
        if module is not None:
            yield set_attribute(module, "_compiled_call_impl", wrapper.dynamo_ctx(module._call_impl))
            setattr(pipe, name, module)
            yield partial(setattr, pipe, name, wrapper)


def refuse_cuda_graphs(compiled: Any) -> None:
    """Raise PlanError: `torch.compile` captures what it has compiled in CUDA graphs (mode="reduce-overhead")."""
    options: Mapping[str, object] = getattr(compiled, "get_compiler_config", dict)() or {}
    if options.get("triton.cudagraphs"):
        raise PlanError(
            "a parallel transformer cannot be compiled with mode='reduce-overhead' (or 'max-autotune'), which captures "
            "parts of it in CUDA graphs: leave out the mode, and use parallelize_pipeline(graphs=True)"
        )


def planned_transformers(pipe: Any, components: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the components that denoise, by name; a component with two names is listed once.

    Raises: PlanError: no component has a plan, or a component cannot be parallel.
    """
    transformers: dict[str, nn.Module] = {}
    for name, module in components.items():
        if not isinstance(module, nn.Module) or any(module is other for other in transformers.values()):
            continue
        if any(installed_on(inner) is not None for inner in module.modules()):
            raise PlanError(
                f"{name} is already context-parallel, on its own or in another pipeline: undo that first. (A pipeline "
                "that shares a parallel transformer, from from_pipe, can be called with equal noise on all ranks)"
            )
        if refusal(type(module)) is not None:
            raise PlanError(f"{type(pipe).__name__}.{name}: {no_plan_message(type(module))}")
        if registered_plan(type(module)) is not None and not is_controlnet(module):
            transformers[name] = module
    if not transformers:
        modules = {name: type(x).__name__ for name, x in components.items() if isinstance(x, nn.Module)}
        raise PlanError(
            f"{type(pipe).__name__} has no transformer with a plan (its components: {modules}); docs/models.md lists "
            "the classes that have one"
        )
    return transformers


def experts_of(pipe: Any, transformers: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the names of a pipeline's transformers if each of them computes some of the steps."""
    switches = getattr(getattr(pipe, "config", None), "boundary_ratio", None) is not None
    return tuple(transformers) if switches else ()


def refuse_processor_swaps(pipe: Any) -> None:
    """Refuse PAG pipelines, because each call replaces our attention processors. Raises: PlanError."""
    if hasattr(pipe, "set_pag_applied_layers"):
        name = type(pipe).__name__
        raise PlanError(
            f"{name} replaces attention processors in each call (perturbed attention guidance), so attention would be "
            f"limited to the tokens of one rank: use {name.replace('PAG', '')}, or run it in one process. (In "
            "pipelines with guiders, the guider PerturbedAttentionGuidance is supported)"
        )


def check_guiders(pipe: Any, ranks: SampleGroups) -> None:
    """Before a call, refuse guiders with random dropout: ranks would draw different values. Raises: PlanError."""
    if ranks.sample.context_size == 1:
        return
    for name, guider in pipe.components.items():
        for dropout in _dropouts(guider):
            if dropout not in (0, 1):
                raise PlanError(
                    f"{type(pipe).__name__}.{name}: {type(guider).__name__} has random dropout (dropout={dropout}), "
                    "for which ranks would draw other numbers than one process: use dropout=1.0, which skips the layers"
                )


def _dropouts(guider: Any) -> list[float]:
    """Return the dropouts of the `LayerSkipConfig`s of diffusers in any attribute of a guider."""
    values = vars(guider).values() if hasattr(guider, "prepare_models") else ()
    configs = [config for value in values if isinstance(value, list) for config in value]
    return [config.dropout for config in configs if hasattr(config, "skip_attention_scores")]


def build_component(class_name: str, config: Mapping[str, Any], library: str = "") -> nn.Module | None:
    """Build a component on the meta device; None if its class has no weights. Raises: ValueError: unknown class.

    Args: library: as in the pipeline's index; a few classes are in the module of one pipeline of diffusers only.
    """
    import diffusers
    import transformers

    homes = (diffusers, transformers, getattr(diffusers.pipelines, library, None))
    kind: Any = next((found for home in homes if (found := getattr(home, class_name, None)) is not None), None)
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
