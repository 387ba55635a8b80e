"""Hold the transformers of a pipeline that are trained in one run: each step runs and trains one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_cp.finetune.host_weights import HostWeights


class Experts(nn.ModuleDict):
    """Transformers of one pipeline, by name, of which a forward runs the selected one.

    The parameters of the others get no gradient, so an optimizer with a state for each parameter changes neither them
    nor their states. On a GPU, frozen weights that are not sharded (the base of a LoRA) stay in host memory, and those
    of the transformer that runs are copied to the device before its forward, also if it is called directly. They do
    not change, so they are never copied back. Sharded weights, and weights that train, are always on the device.

    Args: transformers: at least two, by their names in the pipeline.
    """

    runs_one_child = True  # the strategies look for parameters without a gradient in each step

    def __init__(self, transformers: Mapping[str, nn.Module]) -> None:
        super().__init__(dict(transformers))
        if len(transformers) < 2:
            raise ValueError(f"transformers={list(transformers)} must be at least two: train one without Experts")
        self.active = next(iter(transformers))
        self.host = HostWeights(self, list(self.values()))

    def select(self, name: str) -> None:
        """Run this transformer in the next forwards. Call it with the same name on every rank."""
        if name not in self:
            raise ValueError(f"{name!r} is not one of the experts {', '.join(self)}")
        self.active = name

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the selected transformer."""
        return self[self.active](*args, **kwargs)

    @property
    def active_number(self) -> float:
        """Number of the selected transformer, from 1."""
        return float(1 + list(self).index(self.active))

    @property
    def idle(self) -> tuple[str, ...]:
        """Beginnings of the names of the parameters that a step with the selected transformer does not train."""
        return tuple(f"{name}." for name in self if name != self.active)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the selected transformer."""
        dtype: Any = self[self.active].dtype
        assert isinstance(dtype, torch.dtype), "it is a diffusers model"
        return dtype


def experts_in(module: nn.Module) -> Experts | None:
    """Return the experts in a module, which may be wrapped by Fabric, DDP or a LightningModule; None without any."""
    return next((inner for inner in module.modules() if isinstance(inner, Experts)), None)


def named_transformers(module: nn.Module, component: str) -> dict[str, nn.Module]:
    """Return the transformers in a module by name: those of its experts, or the module as `component`."""
    experts = experts_in(module)
    return {component: module} if experts is None else dict(experts.items())
