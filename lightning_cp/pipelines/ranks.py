"""The pieces for a sampling loop of one's own: who computes what, and whole tensors in place of parts."""

from __future__ import annotations

from torch import Tensor

from lightning_cp.comm.shards import gather_uneven, own_shard
from lightning_cp.config import check_degree, context_config
from lightning_cp.mesh import Branches, branches_for


def sampling_ranks(parallel_config: object, *, cfg: int = 1) -> Branches:
    """Who shares a sample with whom, in a world of data x cfg x ring x ulysses ranks.

    `ranks.cfg` and `ranks.cfg_rank` tell of branches of guidance, `ranks.data_size` and `ranks.data_rank` of samples,
    `ranks.context.context_size` and `ranks.context.context_rank` of tokens.

    Args: as of `parallelize_pipeline`. Ranks: the whole world. Raises: ValueError: the degrees do not fit the world.
    """
    return branches_for(context_config(parallel_config), check_degree("cfg", cfg, default=1))


def split(x: Tensor, dim: int, ranks: Branches) -> Tensor:
    """This rank's part of a whole tensor along `dim`, as the engine cuts tokens: uneven lengths, longer parts first.

    Gradient: a slice; backward pads with zeros.
    """
    return own_shard(x, dim, ranks.context)


def gather(x: Tensor, dim: int, ranks: Branches) -> Tensor:
    """The whole of what `split` parts, on every rank.

    Ranks: all of the context group. Gradient: reduce-scatter (sum), the true adjoint.
    """
    return gather_uneven(x, dim, ranks.context)
