"""Trace few of many equal blocks: the first, the second and the last one of a row; the second counts for all others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby

from torch import nn

from lightning_cp.engine.rules.paths import submodule

_KEPT = 3


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


def shorten(model: nn.Module, paths: Sequence[str]) -> dict[nn.Module, int]:
    """Remove all but three blocks of each row of equal ones from the model.

    Args: paths: of its blocks.
    Returns: how often each remaining block counts, in order.
    """
    repeats: dict[nn.Module, int] = {}
    removed: set[nn.Module] = set()
    rows = groupby(paths, key=lambda path: (path.rpartition(".")[0], kind_of(submodule(model, path))))
    for (where, _), row in rows:
        blocks = [submodule(model, path) for path in row]
        is_list = isinstance(submodule(model, where), nn.ModuleList)
        if len(blocks) > _KEPT and is_list:
            removed |= {*blocks[2:-1]}
            repeats |= {blocks[0]: 1, blocks[1]: len(blocks) - 2, blocks[-1]: 1}
        else:
            repeats |= dict.fromkeys(blocks, 1)
    for where in dict.fromkeys(path.rpartition(".")[0] for path in paths):
        parent, _, name = where.rpartition(".")
        blocks_left = [x for x in submodule(model, where).children() if x not in removed]
        if isinstance(submodule(model, where), nn.ModuleList):
            setattr(submodule(model, parent), name, nn.ModuleList(blocks_left))
    return repeats
