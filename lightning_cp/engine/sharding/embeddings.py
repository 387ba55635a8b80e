"""Embed only this rank's patches: convolutions before the blocks that embed each patch alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.rules.rules import Embedding
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.late_gather import can_be_late, gather_late
from lightning_cp.engine.sharding.specs import define_length
from lightning_cp.plans import Split


@dataclass(eq=False)
class EmbeddingHook(EngineHook):
    """Hook around a convolution: it gets this rank's patches, and its output becomes a `LateGather`.

    Gradient: that of an embedding of all patches that is split afterwards. Ranks: all of the context group.

    Attributes: grid: number of patches in each dim, while the convolution embeds this rank's patches; otherwise None.
    """

    session: Session
    rule: Embedding
    grid: tuple[int, ...] | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.grid = None
        call, patch, modality = self.session.call, self.rule.patch, self.rule.modality
        x = args[0] if args else None
        if call is None or not isinstance(x, Tensor) or x.ndim != len(patch) + 2 or not can_be_late(call):
            return args, kwargs
        grid = tuple(n // k for n, k in zip(x.shape[2:], patch, strict=True))
        name = f"the input of {self.rule.path}"
        define_length(prod(grid), Split(1, (modality,)), name=name, session=self.session)
        sizes, rank = call.sizes_of(modality), call.groups.context_rank
        if sum(sizes) != prod(grid) or min(sizes) == 0:
            return args, kwargs
        self.grid = grid
        own = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return (own_patches(x, patch, grid, own), *args[1:]), kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        grid, self.grid = self.grid, None
        if grid is None:
            return output
        call = self.session.current()
        tokens = output.flatten(2).transpose(1, 2).contiguous()
        embedded = gather_late(tokens, 1, call.sizes_of(self.rule.modality), call.groups)
        return torch.unflatten(embedded.transpose(1, 2), 2, grid)


def own_patches(x: Tensor, patch: tuple[int, ...], grid: tuple[int, ...], own: range) -> Tensor:
    """Return some patches of an input [b, c, *sizes] as an input of these patches only, [b, c, n * p0, p1, ...].

    Args: grid: number of patches in each dim. own: the patches to return, counted with the last dim innermost.
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
