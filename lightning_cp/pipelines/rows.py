"""Splitting a batch that holds the branches of guidance one after another, and putting it together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from lightning_cp.comm.shards import gather, shard_range, shard_sizes
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.errors import ShapeError
from lightning_cp.mesh import Branches

_MOST_BRANCHES = 4
_ROW_DIMS = {"encoder_hidden_states_llama3": 1}  # arguments with rows along another dim than 0: HiDream's layers first


def cfg_split(values: Any, ranks: Branches, *, like: Any = None) -> Any:
    """The rows of a batch that this rank's branch computes: [n, ...] -> [about n / cfg, ...].

    Args:
        values: a nest (dict, tuple, list) of what a model is called with. Tensors of n rows are split along dim 0, and
            everything else stays whole.
        ranks: from `sampling_ranks`.
        like: the tensor of n rows, or a list with one entry for each (lists of n entries are split then too); the
            first tensor in `values` if left out.
    Raises: ShapeError: fewer rows than branches.
    """
    like = next(x for x in tree_iter(values) if isinstance(x, Tensor)) if like is None else like
    if len(like) < ranks.cfg:
        raise ShapeError(f"a batch of {len(like)} rows cannot be split over cfg={ranks.cfg} branches")
    mine = shard_range(len(like), ranks.cfg, ranks.cfg_rank)
    return _rows(values, len(like), slice(mine.start, mine.stop), of_lists=isinstance(like, (list, tuple)))


def cfg_merge(values: Any, ranks: Branches, *, like: Any = None) -> Any:
    """The whole batch again, on every rank, from what each branch computed: the inverse of `cfg_split`.

    Args:
        values: a nest of results, tensors [rows of this rank, ...]; other ranks' differ in their rows only.
        ranks: as for `cfg_split`.
        like: as for `cfg_split`; ranks tell each other of their rows if left out.
    Ranks: those of all branches. Forward: all-gather along dim 0. Backward: reduce-scatter (sum).
    """
    group = ranks.across.context
    if group is None:
        return values
    if like is None:
        rows = len(next(x for x in tree_iter(values) if isinstance(x, Tensor)))
        sizes = [n for (n,) in all_gather_ints([rows], group=group)]
    else:
        sizes = list(shard_sizes(len(like), ranks.cfg))
    own, listed = sizes[ranks.cfg_rank], isinstance(like, (list, tuple))

    def is_list(x: Any) -> bool:
        return listed and isinstance(x, (list, tuple)) and len(x) == own and all(isinstance(y, Tensor) for y in x)

    def merge(x: Any) -> Any:
        if is_list(x):
            return type(x)(gather(torch.stack(list(x)), 0, sizes, ranks.across.name).unbind())
        if not isinstance(x, Tensor):
            return x
        if not x.ndim or x.shape[0] != own:
            raise ShapeError(f"a result of shape {tuple(x.shape)} does not have the {own} rows of this rank's branch")
        return gather(x, 0, sizes, ranks.across.name)

    return tree_map(merge, values, is_leaf=is_list)


def is_repeated(main: Any) -> bool:
    """Whether a batch (a tensor, or a list with a tensor for each sample) is one part repeated, as guidance does it."""
    if isinstance(main, Tensor):
        size = main.shape[0] if main.ndim else 0
    elif isinstance(main, (list, tuple)) and all(isinstance(x, Tensor) for x in main):
        size = len(main)
    else:
        return False
    return any(_repeats(main, size // k) for k in range(2, _MOST_BRANCHES + 1) if size and size % k == 0)


def _repeats(main: Any, part: int) -> bool:
    """Whether each part equals the one before it."""
    if isinstance(main, Tensor):
        return torch.equal(main[part:], main[:-part])
    return all(torch.equal(a, b) for a, b in zip(main[part:], main[:-part], strict=True))


def _rows(value: Any, size: int, chosen: slice, *, of_lists: bool, dim: int = 0) -> Any:
    if isinstance(value, Tensor):
        is_split = value.ndim > dim and value.shape[dim] == size
        return value[(slice(None),) * dim + (chosen,)] if is_split else value
    if isinstance(value, dict):
        return {
            name: _rows(x, size, chosen, of_lists=of_lists, dim=_ROW_DIMS.get(name, 0)) for name, x in value.items()
        }
    if isinstance(value, list) and len(value) == size and (of_lists or _describes_samples(value)):
        return value[chosen]
    if isinstance(value, (list, tuple)):
        return type(value)(_rows(x, size, chosen, of_lists=of_lists) for x in value)
    return value


def _describes_samples(value: list[Any]) -> bool:
    """Whether entries are shapes or texts, one for each sample. Numbers may be anything (numbers of layers)."""
    return all(
        isinstance(x, (str, list, tuple)) and not any(isinstance(y, Tensor) for y in tree_iter(x)) for x in value
    )
