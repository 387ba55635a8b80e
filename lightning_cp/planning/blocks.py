"""Trace few of many equal blocks: the first and the last ones of a row, and one that counts for all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from lightning_cp.engine.paths import submodule


def kind_of(block: nn.Module) -> Hashable:
    """Return what blocks have in common that do the same: classes, plain settings and the forms of weights."""
    modules = tuple(
        (name, type(inner), tuple(sorted((key, repr(value)) for key, value in vars(inner).items() if _is_plain(value))))
        for name, inner in block.named_modules()
    )
    weights = tuple((name, x.shape, x.dtype, x.requires_grad) for name, x in block.named_parameters())
    return modules, weights


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))


@dataclass(frozen=True)
class Shortened:
    """What is left of a model's blocks.

    Attributes:
        repeats: how often each remaining block counts, in order.
        weights: module and name of each weight of the whole model, in order. The weights of a removed block are named
            as those of the block that counts for it.
    """

    repeats: dict[nn.Module, int]
    weights: list[tuple[nn.Module, str]]


def shorten(model: nn.Module, paths: Sequence[str], *, margin: int | None) -> Shortened:
    """Remove all but a few blocks of each row of equal ones from the model.

    Args:
        paths: paths of the blocks.
        margin: number of blocks to keep before and after the one that counts for all others. A block must not change
            what blocks do that are further away. None: no block is removed, nor where a block cannot count for another.
    """
    margin = len(paths) if margin is None or _differ(model, paths) else margin
    repeats: dict[nn.Module, int] = {}
    removed: dict[nn.Module, nn.Module] = {}  # modules of removed blocks -> those of the block that counts for them
    rows = groupby(paths, key=lambda path: (path.rpartition(".")[0], kind_of(submodule(model, path))))
    for (where, _), row in rows:
        blocks = [submodule(model, path) for path in row]
        is_list = isinstance(submodule(model, where), nn.ModuleList)
        if len(blocks) > 2 * margin + 1 and is_list:
            for block in blocks[margin + 1 : -margin]:
                removed |= zip(block.modules(), blocks[margin].modules(), strict=True)
            repeats |= dict.fromkeys(blocks[: margin + 1] + blocks[-margin:], 1)
            repeats[blocks[margin]] = len(blocks) - 2 * margin
        else:
            repeats |= dict.fromkeys(blocks, 1)
    weights = {x: (removed.get(inner, inner), name) for inner, name, x in _weights(model)}
    for where in dict.fromkeys(path.rpartition(".")[0] for path in paths):
        parent, _, name = where.rpartition(".")
        blocks_left = [x for x in submodule(model, where).children() if x not in removed]
        if isinstance(submodule(model, where), nn.ModuleList):
            setattr(submodule(model, parent), name, nn.ModuleList(blocks_left))
    return Shortened(repeats, list(weights.values()))


def _differ(model: nn.Module, paths: Sequence[str]) -> bool:
    """Return True if equal blocks are not alike in the model: they share weights, or it has a module for each block."""
    blocks = [submodule(model, path) for path in paths]
    inside = {inner for block in blocks for inner in block.modules()}
    rows = {where: len(list(row)) for where, row in groupby(paths, key=lambda path: path.rpartition(".")[0])}
    counts, lists = {*rows.values(), len(paths)}, (x for x in model.modules() if isinstance(x, nn.ModuleList))
    of_each = (x for x in lists if len(x) in counts and x not in inside and inside.isdisjoint(x))
    shared = Counter(x for _, x in model.named_parameters(remove_duplicate=False))
    return any(True for _ in of_each) or any(shared[x] > 1 for block in blocks for x in block.parameters())


def _weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for inner in model.modules():
        yield from ((inner, name, x) for name, x in inner.named_parameters(recurse=False))
