"""Hold the transformers of a pipeline that are trained in one run: each step runs and trains one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override


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
        self._on_device: str | None = None
        self._in_host: list[tuple[nn.Module, str, nn.Parameter]] = []  # of the transformer on the device
        for name, transformer in self.items():
            transformer.register_forward_pre_hook(partial(self._fetch, name), prepend=True)

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

    def _fetch(self, name: str, *_: object) -> None:
        """Copy a transformer's frozen weights to the device of its other weights, in place of another one's."""
        if name == self._on_device:
            return
        self._release()
        device = next((x.device for x in self[name].parameters() if x.requires_grad), None)
        copies: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
        for module, key, x in list(_frozen(self[name])):
            if device is not None and x.device != device:
                if x not in copies:
                    copies[x] = nn.Parameter(x.detach().to(device, non_blocking=True), requires_grad=False)
                self._in_host.append((module, key, x))
                module._parameters[key] = copies[x]
        self._on_device = name

    def _release(self) -> None:
        """Free the copies on the device."""
        for module, key, x in self._in_host:
            module._parameters[key] = x
        self._in_host, self._on_device = [], None

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Leave frozen weights in host memory when the module is moved to another device."""
        self._release()

        def moved(x: Tensor) -> Tensor:
            if not isinstance(x, nn.Parameter) or x.requires_grad or not _is_in_host(x):
                return fn(x)
            target = fn(torch.empty(0, dtype=x.dtype))
            if target.device.type in ("cpu", "meta"):
                return fn(x)
            return x if target.dtype == x.dtype else x.to(target.dtype)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


def experts_in(module: nn.Module) -> Experts | None:
    """Return the experts in a module, which may be wrapped by Fabric, DDP or a LightningModule; None without any."""
    return next((inner for inner in module.modules() if isinstance(inner, Experts)), None)


def named_transformers(module: nn.Module, component: str) -> dict[str, nn.Module]:
    """Return the transformers in a module by name: those of its experts, or the module as `component`."""
    experts = experts_in(module)
    return {component: module} if experts is None else dict(experts.items())


def _frozen(transformer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the frozen weights that are not sharded: their module, name and value."""
    for module in transformer.modules():
        for key, x in module._parameters.items():
            if x is not None and not x.requires_grad and not isinstance(x, DTensor):
                yield module, key, x


def _is_in_host(x: Tensor) -> bool:
    return x.device.type == "cpu" and not isinstance(x, DTensor)
