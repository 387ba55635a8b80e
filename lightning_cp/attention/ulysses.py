"""Ulysses: tokens of one rank and all heads become all tokens of the group and some heads, and back.

Heads are shared out evenly, earlier ranks taking one more where they do not divide. A key-value head goes wherever a
query head uses it; its gradients are summed.
Source: Jacobs et al., arXiv:2309.14509.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.messages import swap
from lightning_cp.comm.packet import Layout, Piece
from lightning_cp.kernels import Grads, Part


@dataclass(frozen=True)
class HeadShare:
    """Heads of one rank: query heads [q_start, q_stop), and the key-value heads [k_start, k_stop) that they use."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    group: int  # query heads to a key-value head

    @property
    def query(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def key(self) -> slice:
        return slice(self.k_start, self.k_stop)

    @property
    def ragged(self) -> list[int] | None:
        """Local key-value head of each local query head, where they do not group evenly; else None."""
        used = [head // self.group - self.k_start for head in range(self.q_start, self.q_stop)]
        width, heads = len(used), self.k_stop - self.k_start
        even = width % heads == 0 and used == [i // (width // heads) for i in range(width)]
        return None if even else used


def share_heads(hq: int, hk: int, degree: int) -> list[HeadShare]:
    """Each rank's heads, of hq query and hk key-value heads (hk divides hq, degree <= hq)."""
    bounds = [rank * (hq // degree) + min(rank, hq % degree) for rank in range(degree + 1)]
    group = hq // hk
    return [HeadShare(a, b, a // group, (b - 1) // group + 1, group) for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class Ulysses:
    """What one exchange knows beside its tensors.

    Attributes:
        shares: of each rank of `group`.
        q_lengths, kv_lengths: local tokens of each rank of `group`.
        mask_kind: "keys", "rows" or "" (see `Ring`). mask_rows: rows of each rank's mask, as it comes.
    """

    group: dist.ProcessGroup
    shares: tuple[HeadShare, ...]
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    mask_kind: str
    mask_rows: tuple[int, ...]

    @property
    def mine(self) -> HeadShare:
        """This rank's heads."""
        return self.shares[dist.get_rank(self.group)]


def tokens_to_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, to: Ulysses
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """[b, s_local, h, d] -> [b, s_group, h_local, d] for q, k and v, and the mask that goes with them; one collective.

    K and V come with a head for each query head where these do not group evenly.
    Ranks: all of `to.group`; each sends its tokens' (hq + 2 hk) d elements, less its own share. Adjoint:
    `grads_to_tokens`.
    """
    messages, layouts, b, d = [], [], q.shape[0], q.shape[3]
    for share, sq, sk, rows in zip(to.shares, to.q_lengths, to.kv_lengths, to.mask_rows, strict=True):
        message = [q[:, :, share.query], k[:, :, share.key], v[:, :, share.key]]
        hq, hk = to.mine.q_stop - to.mine.q_start, to.mine.k_stop - to.mine.k_start
        layout = [Piece((b, sq, hq, d), q.dtype), Piece((b, sk, hk, d), k.dtype), Piece((b, sk, hk, d), v.dtype)]
        if mask is not None:
            message.append(mask if mask.shape[1] == 1 else mask[:, share.query])
            heads = 1 if mask.shape[1] == 1 else hq
            size = (1, sk) if to.mask_kind == "keys" else (rows, mask.shape[3])
            layout.append(Piece((mask.shape[0], heads, *size), mask.dtype))
        messages.append(message)
        layouts.append(layout)
    received = swap(messages, layouts, group=to.group)
    q, k, v = (torch.cat([message[i] for message in received], 1) for i in range(3))
    if to.mine.ragged is not None:
        used = torch.tensor(to.mine.ragged, device=k.device)
        k, v = k.index_select(2, used), v.index_select(2, used)
    if mask is None:
        return q, k, v, None
    masks = [message[3] for message in received]
    if to.mask_kind == "keys":
        return q, k, v, torch.cat(masks, 3)
    rows_of = [x.expand(-1, -1, sq, -1) for x, sq in zip(masks, to.q_lengths, strict=True)]
    return q, k, v, torch.cat(rows_of, 2)


def queries_to_heads(tensors: list[Tensor], *, to: Ulysses) -> list[Tensor]:
    """[b, s_local, hq, ...] -> [b, s_group, hq_local, ...], for what is shaped like the queries; one collective.

    Ranks: all of `to.group`. Adjoint: `queries_to_tokens`.
    """
    messages = [[x[:, :, share.query] for x in tensors] for share in to.shares]
    heads = to.mine.q_stop - to.mine.q_start
    layouts: list[Layout] = [
        [Piece((x.shape[0], sq, heads, *x.shape[3:]), x.dtype) for x in tensors] for sq in to.q_lengths
    ]
    received = swap(messages, layouts, group=to.group)
    return [torch.cat(parts, 1) for parts in zip(*received, strict=True)]


def queries_to_tokens(tensors: list[Tensor], *, to: Ulysses) -> list[Tensor]:
    """[b, s_group, hq_local, ...] -> [b, s_local, hq, ...]; one collective.

    Ranks: all of `to.group`. Adjoint: `queries_to_heads`.
    """
    messages = list(zip(*(torch.split(x, list(to.q_lengths), 1) for x in tensors), strict=True))
    mine = to.q_lengths[dist.get_rank(to.group)]
    layouts: list[Layout] = [
        [Piece((x.shape[0], mine, share.q_stop - share.q_start, *x.shape[3:]), x.dtype) for x in tensors]
        for share in to.shares
    ]
    received = swap(messages, layouts, group=to.group)
    return [torch.cat(parts, 2) for parts in zip(*received, strict=True)]


def part_to_tokens(part: Part, *, with_lse: bool, to: Ulysses) -> Part:
    """A part over this rank's heads as one over its tokens; without its lse (then empty) unless asked."""
    out, *lse = queries_to_tokens([part.out, part.lse] if with_lse else [part.out], to=to)
    return Part(out, lse[0] if with_lse else part.lse.new_empty(0))


def grads_to_tokens(grads: Grads, hk: int, *, to: Ulysses) -> Grads:
    """Gradients of `tokens_to_heads`' results -> those of its arguments; shares of one head are summed.

    Ranks: all of `to.group`; one collective.
    """
    dq, dk, dv = grads
    if to.mine.ragged is not None:
        dk, dv = (_sum_heads(x, to.mine) for x in (dk, dv))
    lengths = (to.q_lengths, to.kv_lengths, to.kv_lengths)
    split = [torch.split(x, list(sizes), 1) for x, sizes in zip((dq, dk, dv), lengths, strict=True)]
    rank, b, d = dist.get_rank(to.group), dq.shape[0], dq.shape[3]
    sq, sk = to.q_lengths[rank], to.kv_lengths[rank]
    layouts: list[Layout] = []
    for share in to.shares:
        keys = (b, sk, share.k_stop - share.k_start, d)
        layouts.append(
            [Piece((b, sq, share.q_stop - share.q_start, d), dq.dtype), Piece(keys, dk.dtype), Piece(keys, dv.dtype)]
        )
    received = swap(list(zip(*split, strict=True)), layouts, group=to.group)
    query = torch.cat([message[0] for message in received], 2)
    totals = [x.new_zeros(b, sk, hk, d, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (dk, dv)]
    for share, (_, *pieces) in zip(to.shares, received, strict=True):
        for total, piece in zip(totals, pieces, strict=True):
            total[:, :, share.key] += piece
    return Grads(query, totals[0].to(dk.dtype), totals[1].to(dv.dtype))


def _sum_heads(x: Tensor, share: HeadShare) -> Tensor:
    heads = torch.tensor(share.ragged, device=x.device)
    return x.new_zeros(*x.shape[:2], share.k_stop - share.k_start, x.shape[3]).index_add_(2, heads, x)
