"""Functions of a VAE that need all rows of an image that is sharded by rows: self-attention and group norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_cp.comm.shards import gather_shards
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.mesh.groups import MeshGroups


def attend_all_rows(
    attend: Callable[..., Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    rest: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    groups: MeshGroups,
) -> Tensor:
    """Compute attention of this rank's queries over the keys of all ranks, all-gathered in rank order.

    The order of the keys differs from one process, which does not change attention.

    Args:
        attend: `F.scaled_dot_product_attention`.
        tensors: local query, key and value [..., positions, head_dim].
        mask: None, or an additive frame mask [..., positions, positions]: 0 if the key's frame is not after the
            query's frame. Positions are ordered by frame.
        rest: positional and keyword arguments of `attend` after the mask.
        groups: context group with the shards.
    Raises: NotImplementedError: any other mask, `is_causal`, or cross-attention.
    Ranks: all of the context group.
    """
    query, key, value = tensors
    assert groups.context is not None, "only several ranks gather keys"
    args, kwargs = rest
    if kwargs.get("is_causal") or any(args[1:2]) or query.shape[-2] != key.shape[-2]:
        raise NotImplementedError(
            "causal attention and cross-attention of a VAE cannot be split by rows: use vae.enable_tiling()"
        )
    lengths = [n for (n,) in all_gather_ints([key.shape[-2]], group=groups.context)]
    if mask is not None:
        mask = _mask_of_frames(mask, lengths)
    dim = key.ndim - 2
    keys, values = (gather_shards(x.contiguous(), dim, lengths, groups.name) for x in (key, value))
    return attend(query, keys, values, mask, *args, **kwargs)


def _mask_of_frames(mask: Tensor, lengths: list[int]) -> Tensor:
    """Extend a local frame mask to the positions of all ranks: [..., local, local] -> [..., local, all]."""
    first = mask[(0,) * (mask.ndim - 1)]  # the first query attends to its own frame only
    frame_length = int((first == 0).sum())
    assert frame_length, "the first position attends to no position"
    assert len(first) % frame_length == 0, (
        f"a mask over {len(first)} positions is not a mask of frames with {frame_length} positions"
    )
    frames = len(first) // frame_length
    by_frame = mask[..., ::frame_length, ::frame_length]
    for_queries = by_frame.repeat_interleave(frame_length, -2)
    if not torch.equal(for_queries.repeat_interleave(frame_length, -1), mask):
        raise NotImplementedError(
            "a VAE's attention mask can be split by rows only if it masks whole frames: use vae.enable_tiling()"
        )
    return torch.cat([for_queries.repeat_interleave(length // frames, -1) for length in lengths], -1)


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
