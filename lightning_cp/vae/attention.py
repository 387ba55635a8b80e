"""Self-attention of a VAE over all positions of an image that is sharded by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
