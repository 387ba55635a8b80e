"""Draw the masks of the workload `sparse`: which pairs they allow, and how much work each rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from lightning_cp.app.benchmark.sparse import MASKS
from lightning_cp.attention.sparse import SparseMask, balanced_order
from lightning_cp.comm.shards import shard_sizes
from lightning_cp.files import writing_new

_COLOURS = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc")  # of the ranks
_ALLOWED = "#252525"
_PIXELS = 256


def draw_masks(config: DictConfig, path: Path) -> None:
    """Draw each mask with the shards of 4 ranks, before and after `balanced_order`, and the work of each rank, as PNG.

    Args: config: the section `sparse`; the masks have its smallest blocks.
    """
    ranks, block = len(_COLOURS), min(config.blocks)
    figure = Figure(figsize=(2.6 * len(MASKS), 7), layout="constrained")
    grid: Any = figure.subplots(3, len(MASKS), sharey="row", height_ratios=(4, 4, 3))
    for axes, (name, build) in zip(grid.T, MASKS.items(), strict=True):
        mask = build(config.tokens, config.frame, block)
        order = balanced_order(mask, ranks)
        places = torch.arange(config.tokens)
        seen = _pixels(mask, places), _pixels(mask, places if order is None else order)
        titles = name, "already balanced" if order is None else "after balanced_order"
        sizes = shard_sizes(len(seen[0]), ranks)
        for axis, pairs, title in zip(axes, seen, titles, strict=False):
            axis.imshow(_picture(pairs, sizes).numpy(), interpolation="nearest")
            axis.set_title(title, fontsize=9)
            axis.set(xticks=[])
        work = [torch.stack([x.sum() for x in torch.split(pairs.float(), list(sizes))]) for pairs in seen]
        for x, values, colours in zip((-0.2, 0.2), work, (["#cccccc"] * ranks, _COLOURS), strict=True):
            axes[2].bar(torch.arange(ranks) + x, values / values.mean(), 0.38, color=colours)
        axes[2].axhline(1, color="black", linewidth=0.8)
        axes[2].set_xticks(range(ranks), [f"rank {i}" for i in range(ranks)], fontsize=8)
    edges = [sum(sizes[:rank]) + sizes[rank] / 2 for rank in range(ranks)]
    for axis in grid[:2, 0]:
        axis.set_yticks(edges, [f"rank {rank}" for rank in range(ranks)], fontsize=8)
        axis.set_ylabel("queries (keys to the right)", fontsize=8)
    grid[2, 0].set_ylabel("work / mean (grey: before)", fontsize=8)
    with writing_new(path):
        figure.savefig(path, dpi=110)


def _pixels(mask: SparseMask, order: Tensor) -> Tensor:
    """Return whether some queries attend to some keys, bool [about 256, about 256], in this order of tokens."""
    chosen, zero = order[:: max(1, len(order) // _PIXELS)], torch.zeros(1, 1, dtype=torch.int64)
    return mask.visible(zero, zero, chosen[:, None], chosen)


def _picture(pairs: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return an RGB image of the pairs, on a ground with the colour of the queries' rank."""
    rows = torch.tensor([to_rgb(colour) for colour in _COLOURS]).repeat_interleave(torch.tensor(sizes), 0)
    return torch.where(pairs[..., None], torch.tensor(to_rgb(_ALLOWED)), rows[:, None])
