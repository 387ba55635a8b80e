"""Tools of a sampling loop: the groups of this rank, tokens, and the samples of branches of guidance (CFG)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.shards import gather_shards, gather_uneven, own_shard, shard_range, shard_sizes
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.compat.torch_names import tree_map
from lightning_cp.config import check_degree, context_config
from lightning_cp.engine.apply import installed_on
from lightning_cp.engine.paths import unwrapped
from lightning_cp.errors import PlanError, ShapeError
from lightning_cp.mesh.sample_groups import SampleGroups, sample_groups_for
from lightning_cp.nest import of_type
from lightning_cp.pipelines.samples import select_samples

_MAX_BRANCHES = 4


def cfg_split(values: Any, ranks: SampleGroups, *, like: Any = None) -> Any:
    """Split a batch over the CFG branches: return this rank's samples, [n, ...] -> [about n / cfg, ...].

    Args:
        values: the model's arguments, as a nest of dicts, tuples and lists. Tensors with n samples are split along
            dim 0; everything else stays whole.
        ranks: result of `sampling_ranks`.
        like: tensor with n samples, or list of n entries (lists of n entries are then split too). None: the first
            tensor in `values`.
    Raises: ShapeError: fewer samples than branches; a class without batch dim.
    """
    like = next(of_type(Tensor, values)) if like is None else like
    if len(like) < ranks.cfg:
        raise ShapeError(f"cfg={ranks.cfg} must be at most the batch size, {len(like)}")
    samples = shard_range(len(like), ranks.cfg, ranks.cfg_rank)
    return select_samples(
        values, len(like), slice(samples.start, samples.stop), of_lists=isinstance(like, (list, tuple))
    )


def cfg_merge(values: Any, ranks: SampleGroups, *, like: Any = None) -> Any:
    """Gather the results of all CFG branches on every rank: the inverse of `cfg_split`.

    Args:
        values: nest of results: tensors [samples of this rank, ...]; shapes on other ranks differ in dim 0 only.
        ranks: result of `sampling_ranks`.
        like: argument `like` of `cfg_split`. None: ranks all-gather their numbers of samples.
    Ranks: all branches. Forward: all-gather along dim 0. Backward: reduce-scatter (sum).
    """
    group = ranks.cfg_groups.context
    if group is None:
        return values
    if like is None:
        count = len(next(of_type(Tensor, values)))
        sizes = [n for (n,) in all_gather_ints([count], group=group)]
    else:
        sizes = list(shard_sizes(len(like), ranks.cfg))
    local_size, splits_lists = sizes[ranks.cfg_rank], isinstance(like, (list, tuple))

    def is_list(x: Any) -> bool:
        return (
            splits_lists
            and isinstance(x, (list, tuple))
            and len(x) == local_size
            and all(isinstance(y, Tensor) for y in x)
        )

    def merge(x: Any) -> Any:
        if is_list(x):
            return type(x)(gather_shards(torch.stack(list(x)), 0, sizes, ranks.cfg_groups.name).unbind())
        if not isinstance(x, Tensor):
            return x
        if not x.ndim or x.shape[0] != local_size:
            raise ShapeError(
                f"a result of shape {tuple(x.shape)} must have {local_size} samples in dim 0, those of this branch"
            )
        return gather_shards(x, 0, sizes, ranks.cfg_groups.name)

    return tree_map(merge, values, is_leaf=is_list)


@contextmanager
def cfg_rows(module: nn.Module, ranks: SampleGroups) -> Iterator[None]:
    """Call `module` with samples from `cfg_split` within this context, if a step cache is enabled on it.

    A cache that compares tokens with the previous step then takes one decision for the samples of all branches.
    Without this context, each branch would decide alone.

    Args:
        module: a context-parallel transformer.
        ranks: result of `sampling_ranks`.
    Ranks: all branches, in each forward. Raises: PlanError: the module is not context-parallel.
    """
    installed = installed_on(unwrapped(module))
    if installed is None:
        raise PlanError(f"{type(module).__name__} is not context-parallel: call apply_context_parallel first")
    with installed.session.sharing_batch(ranks.sample):
        yield


def is_repeated(main: Any) -> bool:
    """Return True if latents (a tensor, or a list of one tensor per sample) are 2 to 4 equal copies, as with CFG."""
    if isinstance(main, Tensor):
        size = main.shape[0] if main.is_floating_point() and main.ndim > 1 else 0  # ids of text have no batch
    elif isinstance(main, (list, tuple)) and all(isinstance(x, Tensor) for x in main):
        size = len(main)
    else:
        return False
    return any(_repeats(main, size // k) for k in range(2, _MAX_BRANCHES + 1) if size and size % k == 0)


def _repeats(main: Any, length: int) -> bool:
    """Return True if each copy of `length` samples equals the previous one."""
    if isinstance(main, Tensor):
        return torch.equal(main[length:], main[:-length])
    return all(torch.equal(a, b) for a, b in zip(main[length:], main[:-length], strict=True))


def sampling_ranks(parallel_config: object, *, cfg: int = 1, shares: Sequence[float] | None = None) -> SampleGroups:
    """Return this rank's groups in a world of data x cfg x ring x ulysses ranks.

    Sizes and indices: `ranks.cfg` and `ranks.cfg_rank` for branches of guidance, `ranks.data_size` and
    `ranks.data_rank` for samples, `ranks.context.context_size` and `ranks.context.context_rank` for tokens.

    Args:
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, lightning_cp's or diffusers'.
        cfg: CFG degree: number of groups that compute branches of guidance in parallel.
        shares: weight of each rank of a context group, for unequal devices; None: equal.
    Ranks: the whole world. Raises: ValueError: the degrees do not fit the world size.
    """
    return sample_groups_for(context_config(parallel_config), check_degree("cfg", cfg, default=1), shares=shares)


def split(x: Tensor, dim: int, ranks: SampleGroups) -> Tensor:
    """Return this rank's shard of a whole tensor along `dim`. Shards may be uneven.

    Gradient: a slice; backward pads with zeros.
    """
    return own_shard(x, dim, ranks.context)


def gather(x: Tensor, dim: int, ranks: SampleGroups) -> Tensor:
    """All-gather the shards of `split` into the whole tensor, on every rank.

    Ranks: all of the context group. Gradient: reduce-scatter (sum), the exact adjoint.
    """
    return gather_uneven(x, dim, ranks.context)
