"""Block-causal attention over shards: each segment of a packed sequence attends to all tokens up to its end.

Text segments are causal within themselves, image segments are not. Segments are ranges of the global sequence, so a
rank holds some (or none) of a segment's queries, and some of the keys up to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_cp.comm.shards import sizes_in
from lightning_cp.engine.session import Call
from lightning_cp.errors import InterceptionError

Segment = tuple[int, int, bool]  # global start, end (exclusive), True if causal within itself
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, tuple[list[int], list[int]]], Tensor]


def attend_by_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segments: Sequence[Segment],
    key_valid: Tensor | None,
    sizes: Sequence[int],
    rank: int,
    attend: Attend,
) -> Tensor:
    """Compute one attention for each segment, and one for the tokens after the last segment.

    Args:
        query, key, value: [b, s_local, h, d].
        segments: consecutive ranges, starting at token 0.
        key_valid: bool [b, s] over the global sequence, True for keys to attend to; None: all keys.
        sizes: number of tokens on each rank, in rank order. rank: this rank.
        attend: attention over all ranks: (query, key, value, mask, (queries on each rank, keys on each rank)) ->
            [b, queries, h, d].
    Returns: [b, s_local, h, d]. Ranks: all of the context group.
    Raises: InterceptionError: a segment does not start where the previous one ends.
    """
    ends = [sum(sizes[: r + 1]) for r in range(len(sizes))]
    starts, whole = [0, *ends[:-1]], ends[-1]
    after = segments[-1][1] if segments else 0
    outputs, expected = [], 0
    for first, last, causal in (*segments, (after, whole, False)):
        if first != expected or last < first:
            raise InterceptionError(f"segments {list(segments)} must be consecutive, starting at token 0")
        expected = last
        queries = [_overlap(first, last, a, b) for a, b in zip(starts, ends, strict=True)]
        keys = [_overlap(0, last, a, b) for a, b in zip(starts, ends, strict=True)]
        if not any(queries):
            continue
        offset = max(first - starts[rank], 0) if queries[rank] else 0
        mask = None
        if causal:
            positions = torch.arange(starts[rank] + offset, starts[rank] + offset + queries[rank], device=query.device)
            mask = (positions[:, None] >= torch.arange(last, device=query.device))[None, None]
            mask = mask if key_valid is None else mask & key_valid[:, None, None, :last]
        elif key_valid is not None:
            mask = key_valid[:, None, None, starts[rank] : starts[rank] + keys[rank]]
        outputs.append(
            attend(
                query.narrow(1, offset, queries[rank]),
                key.narrow(1, 0, keys[rank]),
                value.narrow(1, 0, keys[rank]),
                mask,
                (queries, keys),
            )
        )
    return torch.cat(outputs, 1)


def after_kept_keys(
    call: Call, sizes: Sequence[int], keys: int, mask: Tensor | None
) -> tuple[list[int], Tensor | None]:
    """Find the number of keys on each rank and this rank's part of a mask, if kept keys precede the forward's own.

    An earlier forward had all these tokens in one sequence. Each rank kept the keys of its shard.

    Args:
        sizes: number of this forward's tokens on each rank. keys: this rank's number of keys, with kept ones.
        mask: key mask [b, 1, 1, kept + these] over all keys; None: no mask, then ranks exchange their number of keys.
    Returns: number of keys on each rank (empty: unknown), mask over this rank's keys.
    Raises: InterceptionError: this rank has kept another number of keys.
    """
    if mask is None:
        return [], None
    rank, whole = call.groups.context_rank, mask.shape[-1]
    before = whole - sum(sizes)
    ends = list(accumulate(sizes_in(call.groups, whole)))
    kept = [_overlap(0, before, start, end) for start, end in pairwise([0, *ends])]
    if keys != kept[rank] + sizes[rank] or mask.shape[-2] != 1:
        raise InterceptionError(
            f"attention got {keys} keys and a mask of shape {tuple(mask.shape)}, expected {kept[rank]} kept keys and "
            f"{sizes[rank]} of this forward on this rank: keep keys with the same degrees"
        )
    firsts = sum(kept[:rank]), before + sum(sizes[:rank])
    local_mask = [mask.narrow(-1, first, n) for first, n in zip(firsts, (kept[rank], sizes[rank]), strict=True)]
    return [n + m for n, m in zip(kept, sizes, strict=True)], torch.cat(local_mask, -1)


def _overlap(first: int, last: int, start: int, end: int) -> int:
    return max(0, min(last, end) - max(first, start))
