"""Keep frozen weights in host memory, and copy those of the module that runs to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.comm.background import SideStream, to_device

_Place = tuple[nn.Module, str]  # a module and the name of its weight


class HostWeights:
    """The frozen weights of several modules, of which one runs at a time.

    They stay in host memory when the modules are moved to another device. Before a forward of one of the modules, its
    weights are copied to the device, and the copies of the others are freed. Frozen weights do not change, so nothing
    is copied back. Sharded weights, and weights that train, are always on the device.

    Args:
        owner: module with the modules; its trained weights are on the device.
        units: the modules, in the order in which they run.
        ahead: copy the next module's weights while one runs; in backward, where activation checkpointing runs the
            modules again in reverse order, those of the one before it. Also on a CPU, where each copy is one more.
    """

    def __init__(self, owner: nn.Module, units: Sequence[nn.Module], *, ahead: bool = False) -> None:
        self._owner, self._units, self._ahead = owner, list(units), ahead
        self._host: dict[int, list[tuple[_Place, nn.Parameter]]] = {}  # weights in host memory, by unit with copies
        self._ready: dict[int, Any] = {}  # event after the copies of a unit
        self._side: SideStream | None = None
        self.current: int | None = None  # unit that runs
        for i, unit in enumerate(self._units):
            unit.register_forward_pre_hook(partial(self._fetch, i), prepend=True)
            unit._apply = partial(_apply_in_host, self, unit)  # type: ignore[method-assign]

    @property
    def copied(self) -> list[int]:
        """Units with copies on the device."""
        return sorted(self._host)

    def release(self) -> None:
        """Free all copies."""
        for i in self.copied:
            self._free(i)
        self.current = None

    def _fetch(self, i: int, *_: object) -> None:
        if i == self.current:
            return
        step = -1 if self.current is not None and i < self.current and i + 1 == self.current else 1
        after = i + step if self._ahead and 0 <= i + step < len(self._units) else None
        for other in self.copied:
            if other not in (i, after):
                self._free(other)
        self._copy(i)
        self._wait(i)
        self.current = i
        if after is not None:
            self._copy(after)

    def _copy(self, i: int) -> None:
        if i in self._host:
            return
        device = next((x.device for x in self._owner.parameters() if x.requires_grad), None)
        copies: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
        host = []
        if self._ahead and device is not None:
            self._side = self._side or SideStream(device)
            self._side.follow()
        for module, key, x in list(_frozen(self._units[i])):
            if device is not None and (self._ahead or x.device != device):
                if x not in copies:
                    copies[x] = nn.Parameter(self._copied(x, device), requires_grad=False)
                host.append(((module, key), x))
                module._parameters[key] = copies[x]
        if self._side is not None:
            self._ready[i] = self._side.record()
        self._host[i] = host

    def _copied(self, x: nn.Parameter, device: torch.device) -> Tensor:
        if self._side is None:
            return to_device(x.detach(), device)
        if device.type == "cuda" and not x.is_pinned():
            x.data = x.data.pin_memory()  # once: copies from pinned memory do not wait for the host
        copy = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
        return self._side.copy(copy, x.detach())

    def _wait(self, i: int) -> None:
        """Let the current stream wait for the copies of a unit, if it has not yet."""
        if self._side is not None and i in self._ready:
            self._side.wait(self._ready.pop(i))

    def _free(self, i: int) -> None:
        self._wait(i)  # before other kernels get the memory
        for (module, key), x in self._host.pop(i):
            module._parameters[key] = x


def named_blocks(transformer: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a transformer by name: the items of its own lists of modules."""
    lists = ((name, child) for name, child in transformer.named_children() if isinstance(child, nn.ModuleList))
    return {f"{name}.{i}": block for name, blocks in lists for i, block in enumerate(blocks)}


def offload_blocks(transformer: nn.Module) -> HostWeights:
    """Keep the frozen weights of a transformer's blocks in host memory; those of one or two are on the device.

    The weights of the next block are copied while one runs. Call it after `add_lora` and before set-up.

    Args: transformer: a diffusers model with activation checkpointing, not compiled and not sharded.
    Raises: ValueError: it has no activation checkpointing, is compiled, or has no lists of blocks.
    """
    kind = type(transformer).__name__
    blocks = list(named_blocks(transformer).values())
    if not blocks:
        raise ValueError(f"{kind} has no lists of blocks, so there is nothing to keep in host memory")
    if not getattr(transformer, "is_gradient_checkpointing", False):
        raise ValueError(
            f"{kind} needs activation checkpointing (transformer.enable_gradient_checkpointing()): without it, "
            "backward keeps the weights of all blocks on the device"
        )
    if any(x._compiled_call_impl is not None for x in (transformer, *blocks)):
        raise ValueError(f"{kind} is compiled, and compiled blocks cannot get other weights: do not compile it")
    return HostWeights(transformer, blocks, ahead=True)


def _apply_in_host(host: HostWeights, unit: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Change a module as `nn.Module._apply` does, but leave frozen weights in host memory."""
    host.release()

    def moved(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter) or x.requires_grad or not _is_in_host(x):
            return fn(x)
        target = fn(torch.empty(0, dtype=x.dtype))
        if target.device.type in ("cpu", "meta"):
            return fn(x)
        return x if target.dtype == x.dtype else x.to(target.dtype)

    return type(unit)._apply(unit, moved, recurse)  # type: ignore[no-untyped-call]


def _frozen(unit: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in unit.modules():
        for key, x in module._parameters.items():
            if x is not None and not x.requires_grad and not isinstance(x, DTensor):
                yield module, key, x


def _is_in_host(x: Tensor) -> bool:
    return x.device.type == "cpu" and not isinstance(x, DTensor)
