"""Train a side model (a ControlNet), or a part of the transformer, while the rest of the transformer is frozen."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.finetune.experts import named_transformers
from lightning_cp.finetune.families import Family, SideModel
from lightning_cp.nest import replace
from lightning_cp.pipelines.guidance.controlnets import is_controlnet
from lightning_cp.plans import plan_for


class SteeredTransformer(nn.Module):
    """A transformer and the side model that steers it, as one module with the transformer's output.

    `forward` takes the arguments of `Family.inputs`. Both models may be context-parallel: the side model returns whole
    tensors, which the transformer splits again. Each rank's gradient of the side model is then a partial one, like that
    of any other weight, and a strategy that sets up this module averages it over data and context ranks.

    If their dtypes differ, activations are cast on the way to the side model and back.

    Args: transformer: the frozen base. side: the side model. rule: the names of the side model and of its outputs.
    """

    def __init__(self, transformer: nn.Module, side: nn.Module, rule: SideModel) -> None:
        super().__init__()
        self.transformer, self.rule = transformer, rule
        self.add_module(rule.component, side)

    @property
    def side(self) -> nn.Module:
        """The side model."""
        return self.get_submodule(self.rule.component)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the transformer's activations."""
        base: Any = self.transformer
        dtype: torch.dtype = base.dtype
        return dtype

    def forward(self, **arguments: Any) -> Any:
        """Run the side model, then the transformer. Args: arguments: from `Family.inputs`."""
        base, side = self.dtype, next(self.side.parameters()).dtype
        given = _cast(arguments.pop(self.rule.component), base, side)
        steering = steering_arguments(self.rule, self.side(**given))
        return self.transformer(**arguments, **_cast(steering, side, base))


def steering_arguments(rule: SideModel, output: Any) -> dict[str, Any]:
    """Return the outputs of a side model by the names of the transformer's arguments."""
    outputs = (output,) if len(rule.outputs) == 1 else output
    return dict(zip(rule.outputs, outputs, strict=True))


def freeze_base(model: nn.Module, family: Family) -> None:
    """Freeze the weights that the family does not train.

    Args: model: a transformer, or a `SteeredTransformer`, before set-up.
    """
    prefixes = (f"{model.rule.component}.",) if isinstance(model, SteeredTransformer) else family.trained
    for name, parameter in model.named_parameters():
        if prefixes and not name.startswith(prefixes):
            parameter.requires_grad_(False)


def compile_blocks(model: Any) -> None:
    """Compile the blocks of a model. diffusers names no blocks for ControlNets: those of the plan are compiled."""
    plan = plan_for(model)
    if plan is None or not is_controlnet(model):
        model.compile_repeated_blocks()
        return
    for path in plan.blocks:
        for block in getattr(model, path):
            block.compile()


@contextmanager
def called_by_pipeline(module: nn.Module) -> Iterator[None]:
    """Cast activations as `SteeredTransformer` does, also if a pipeline calls the side model and the transformer."""
    if not isinstance(module, SteeredTransformer):
        yield
        return
    base, side = module.dtype, next(module.side.parameters()).dtype
    before = module.side.register_forward_pre_hook(
        lambda _, args, kwargs: (args, _cast(kwargs, base, side)), with_kwargs=True, prepend=True
    )
    after = module.side.register_forward_hook(lambda _, args, output: _cast({"": output}, side, base)[""])
    try:
        yield
    finally:
        before.remove()
        after.remove()


class _CalledError(Exception):
    """Raised at the first call of a model, to end the work before it."""


@contextmanager
def until_called(*models: nn.Module) -> Iterator[dict[str, Any]]:
    """End the body at the first call of one of the models. Yields: a dict that receives its arguments by name."""
    arguments: dict[str, Any] = {}

    def catch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments.update(zip(inspect.signature(model.forward).parameters, args), **kwargs)
        raise _CalledError

    with ExitStack() as stack, suppress(_CalledError):
        for model in models:
            stack.callback(model.register_forward_pre_hook(catch, prepend=True, with_kwargs=True).remove)
        yield arguments


def trained_model(module: nn.Module) -> nn.Module:
    """Return the side model inside of a module and its wrappers; without a side model, the module itself."""
    return next((inner.side for inner in module.modules() if isinstance(inner, SteeredTransformer)), module)


def models_by_component(module: nn.Module, component: str) -> dict[str, nn.Module]:
    """Return the models of a module by their names in the pipeline. Args: component: name of a single trained model."""
    if isinstance(module, SteeredTransformer):
        return {component: module.side, "transformer": module.transformer}
    return named_transformers(module, component)


def _cast(values: Mapping[str, Any], source: torch.dtype, target: torch.dtype) -> dict[str, Any]:
    if source == target:
        return dict(values)
    cast: dict[str, Any] = replace(Tensor, lambda x: x.to(target) if x.dtype == source else x, dict(values))
    return cast
