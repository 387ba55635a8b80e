"""Embed only this rank's patches: convolutions before the blocks that embed each patch alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.shards import sizes_in
from lightning_cp.engine.forwards import has_dropout, own_function
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.rules.paths import class_of, without_adapters
from lightning_cp.engine.rules.rules import Embedding
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.late_gather import can_be_late, gather_late, note_once

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(eq=False)
class EmbeddingHook(EngineHook):
    """Hook around a convolution: it gets this rank's patches, and its output becomes a `LateGather`.

    The convolution gets all patches if code of the user may need them: hooks that run around it, a subclass or a
    forward of its own, dropout in an adapter (all ranks draw the same random numbers), or other strides or padding.
    Gradient: that of an embedding of all patches that is split afterwards. Ranks: all of the context group.

    Attributes:
        grid: number of patches in each dim, while the convolution embeds this rank's patches; otherwise None.
        sizes: number of patches of each rank, at the same time.
    """

    session: Session
    rule: Embedding
    grid: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.grid = None
        call, x = self.session.call, args[0] if args else None
        if call is None or not isinstance(x, Tensor) or not can_be_late(call):
            return args, kwargs
        layer: Any = without_adapters(module)
        if not _is_by_patch(layer) or not self._is_alone(module):
            note_once(f"{self.rule.path} embeds all patches on each rank: it has hooks, dropout or code of its own")
            return args, kwargs
        patch, modality = layer.kernel_size, self.rule.modality
        if x.ndim != len(patch) + 2:
            return args, kwargs
        grid = tuple(n // k for n, k in zip(x.shape[2:], patch, strict=True))
        sizes = call.sizes_of(modality) if modality in call.lengths else tuple(sizes_in(call.groups, prod(grid)))
        if sum(sizes) != prod(grid) or min(sizes) == 0:
            return args, kwargs
        call.peers.start()  # before any gather: with unequal inputs it would hang
        self.grid, self.sizes, rank = grid, sizes, call.groups.context_rank
        own = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return (own_patches(x, patch, grid, own), *args[1:]), kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        grid, self.grid = self.grid, None
        if grid is None:
            return output
        tokens = output.flatten(2).transpose(1, 2).contiguous()
        embedded = gather_late(tokens, 1, self.sizes, self.session.current().groups)
        return torch.unflatten(embedded.transpose(1, 2), 2, grid)

    def _is_alone(self, module: nn.Module) -> bool:
        """Return True if no hook sees the shards, and nothing inside of the module drops values at random."""
        before, after = module._forward_pre_hooks.values(), module._forward_hooks.values()
        if next(reversed(before)) != self.before or next(iter(after)) != self.after:
            return False
        if module._backward_hooks or module._backward_pre_hooks:
            return False
        inner = [x for x in module.modules() if x is not module]
        return not has_dropout(module) and not any(getattr(x, name) for x in inner for name in _HOOKS)


def _is_by_patch(layer: nn.Module) -> bool:
    """Return True if a layer is a convolution of torch that computes each patch alone."""
    kind: Any = class_of(layer)
    if kind not in _CONVOLUTIONS or own_function(layer) is not kind.forward:
        return False
    assert isinstance(layer, _CONVOLUTIONS), "its class is one of them"
    is_padded = layer.padding != "valid" and any(n != 0 for n in layer.padding)
    return layer.kernel_size == layer.stride and not is_padded and all(n == 1 for n in layer.dilation)


def own_patches(x: Tensor, patch: tuple[int, ...], grid: tuple[int, ...], own: range) -> Tensor:
    """Return some patches of an input [b, c, *sizes] as an input of these patches only, [b, c, n * p0, p1, ...].

    Args:
        patch: size of a patch in each dim after the channels.
        grid: number of patches in each of these dims. A rest of the input that fills no patch is left out.
        own: numbers of the patches to return. They are counted with the last dim innermost.
    """
    dims, row = len(patch), prod(grid[1:])
    first, last = own.start // row, -(-own.stop // row)  # rows of the first dim with these patches
    x = x.narrow(2, first * patch[0], (last - first) * patch[0])
    counts = (last - first, *grid[1:])
    for dim in reversed(range(dims)):
        count, size = counts[dim], patch[dim]
        x = torch.unflatten(x.narrow(dim + 2, 0, count * size), dim + 2, (count, size))
    x = x.permute(0, 1, *range(2, 2 * dims + 2, 2), *range(3, 2 * dims + 3, 2)).flatten(2, dims + 1)
    return x.narrow(2, own.start - first * row, len(own)).flatten(2, 3)
