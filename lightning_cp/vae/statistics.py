"""Group normalisation of tensors that are sharded by rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_cp.comm.shards import gather_shards
from lightning_cp.mesh.groups import MeshGroups


def group_norm_of_all_rows(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, *, eps: float, groups: MeshGroups
) -> Tensor:
    """Apply `F.group_norm` to this rank's positions, with mean and variance over the positions of all ranks.

    mean = sum n_r mean_r / n;  var = sum n_r (var_r + (mean_r - mean)^2) / n, in float64

    Args:
        x: [b, c, ...]; the number of positions may differ between ranks.
        weight, bias: [c].
    Ranks: all of the context group. Communication: all-gather of 3 numbers per sample and channel group.
    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm, 1979.
    """
    batch, channels = x.shape[:2]
    wide = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(x.reshape(batch, num_groups, -1).to(wide), dim=-1, correction=0)
    count = torch.full_like(mean, x[0, 0].numel() * (channels // num_groups), dtype=torch.float64)
    moments = torch.stack([count, mean.double(), var.double()])[None]
    counts, means, variances = gather_shards(moments, 0, [1] * groups.context_size, groups.name).unbind(1)
    fraction = counts / counts.sum(0)
    mean = (fraction * means).sum(0)
    var = (fraction * (variances + (means - mean).square())).sum(0)
    # Batch norm with one channel per (sample, channel): one pass over x, and no copy of x in a wider dtype.
    mean, var = (s.repeat_interleave(channels // num_groups, 1).flatten().to(wide) for s in (mean, var))
    scale, shift = (None if w is None else w.to(wide).repeat(batch) for w in (weight, bias))
    flat = x.reshape(1, batch * channels, -1)
    return F.batch_norm(flat, mean, var, scale, shift, training=False, eps=eps).reshape(x.shape)
