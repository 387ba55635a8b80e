"""Block-causal attention over shards: segments of a packed sequence, each of which sees all up to its own end.

A segment of text is causal in itself, one of an image is not. Segments are places in the whole sequence, so a rank has
some queries of each (or none), and some of the keys before its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_cp.errors import InterceptionError

Segment = tuple[int, int, bool]  # first token, the one after the last, whether causal in itself
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
    """One attention for each segment, and one for what comes after the last.

    Args:
        query, key, value: [b, s_local, h, d].
        segments: one after the other from the start.
        key_valid: [b, s] bool, of the whole sequence; None: all are.
        sizes: tokens of each rank. rank: this one.
        attend: (query, key, value, mask, tokens of each rank) -> [b, queries, h, d], over all ranks.
    Returns: [b, s_local, h, d]. Ranks: all of the context group.
    Raises: InterceptionError: a segment that is not where the one before it ends.
    """
    ends = [sum(sizes[: r + 1]) for r in range(len(sizes))]
    starts, whole = [0, *ends[:-1]], ends[-1]
    after = segments[-1][1] if segments else 0
    outputs, expected = [], 0
    for first, last, causal in (*segments, (after, whole, False)):
        if first != expected or last < first:
            raise InterceptionError(f"segments {list(segments)} do not follow each other")
        expected = last
        queries = [_overlap(first, last, a, b) for a, b in zip(starts, ends, strict=True)]
        keys = [_overlap(0, last, a, b) for a, b in zip(starts, ends, strict=True)]
        if not any(queries):
            continue
        offset = max(first - starts[rank], 0) if queries[rank] else 0
        mask = None
        if causal:
            places = torch.arange(starts[rank] + offset, starts[rank] + offset + queries[rank], device=query.device)
            mask = (places[:, None] >= torch.arange(last, device=query.device))[None, None]
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


def _overlap(first: int, last: int, start: int, end: int) -> int:
    return max(0, min(last, end) - max(first, start))
