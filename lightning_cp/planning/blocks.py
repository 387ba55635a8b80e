"""Trace few of many equal blocks: the first and the last ones of a row, and one that counts for all others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby

from torch import nn

from lightning_cp.engine.rules.paths import submodule


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


def shorten(model: nn.Module, paths: Sequence[str], *, margin: int) -> dict[nn.Module, int]:
    """Remove all but a few blocks of each row of equal ones from the model.

    Args:
        paths: of its blocks.
        margin: number of blocks that are kept before and after the one that counts for all others: blocks have an
            influence on so many others, and on all in the same way.
    Returns: how often each remaining block counts, in order.
    """
    repeats: dict[nn.Module, int] = {}
    removed: set[nn.Module] = set()
    rows = groupby(paths, key=lambda path: (path.rpartition(".")[0], kind_of(submodule(model, path))))
    for (where, _), row in rows:
        blocks = [submodule(model, path) for path in row]
        is_list = isinstance(submodule(model, where), nn.ModuleList)
        if len(blocks) > 2 * margin + 1 and is_list:
            removed |= {*blocks[margin + 1 : -margin]}
            repeats |= dict.fromkeys(blocks[: margin + 1] + blocks[-margin:], 1)
            repeats[blocks[margin]] = len(blocks) - 2 * margin
        else:
            repeats |= dict.fromkeys(blocks, 1)
    for where in dict.fromkeys(path.rpartition(".")[0] for path in paths):
        parent, _, name = where.rpartition(".")
        blocks_left = [x for x in submodule(model, where).children() if x not in removed]
        if isinstance(submodule(model, where), nn.ModuleList):
            setattr(submodule(model, parent), name, nn.ModuleList(blocks_left))
    return repeats
