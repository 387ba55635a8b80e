"""Tools for a custom sampling loop: the groups of this rank, and `split` and `gather` along tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_cp.comm.shards import gather_uneven, own_shard
from lightning_cp.config import check_degree, context_config
from lightning_cp.mesh.sample_groups import SampleGroups, sample_groups_for


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
