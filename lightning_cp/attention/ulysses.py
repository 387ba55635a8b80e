"""Ulysses: tokens of one rank and all heads become all tokens of the group and some heads, and back.

Heads are shared out evenly, earlier ranks taking one more where they do not divide. A key-value head goes wherever a
query head uses it; its gradients are summed.
Source: Jacobs et al., arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.messages import swap
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
    def parts(self) -> tuple[slice, slice, slice]:
        """Of q, k and v."""
        return self.query, self.key, self.key

    @property
    def ragged(self) -> bool:
        """Whether local query heads do not group evenly with local key-value heads."""
        used = [head // self.group - self.k_start for head in range(self.q_start, self.q_stop)]
        width, heads = len(used), self.k_stop - self.k_start
        even = width % heads == 0 and used == [i // (width // heads) for i in range(width)]
        return not even

    def key_heads(self, device: torch.device) -> Tensor:
        """Local key-value head of each local query head."""
        return torch.arange(self.q_start, self.q_stop, device=device) // self.group - self.k_start


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
    """[b, s_local, h, d] -> [b, s_group, h_local, d] for q, k and v, and the mask that goes with them, at once.

    They come as views of [s_group, b, h_local, d], so that each rank's tokens land where they belong. K and V come with
    a head for each query head where these do not group evenly.
    Ranks: all of `to.group`; each sends its tokens' (hq + 2 hk) d elements, less its own share. Adjoint:
    `grads_to_tokens`.
    """
    lengths, mine = (to.q_lengths, to.kv_lengths, to.kv_lengths), to.mine
    heads = (mine.q_stop - mine.q_start, *[mine.k_stop - mine.k_start] * 2)
    wholes = [_rows(x, sum(n), h) for x, n, h in zip((q, k, v), lengths, heads, strict=True)]
    landings = [list(rows) for rows in zip(*map(_by_rank, wholes, lengths), strict=True)]
    messages = [[_by_row(x[:, :, part]) for x, part in zip((q, k, v), share.parts, strict=True)] for share in to.shares]
    masks: list[Tensor] = []
    if mask is not None:
        for message, landing, share, sk, rows in zip(
            messages, landings, to.shares, to.kv_lengths, to.mask_rows, strict=True
        ):
            message.append(mask if mask.shape[1] == 1 else mask[:, share.query])
            size = (1, sk) if to.mask_kind == "keys" else (rows, mask.shape[3])
            masks.append(mask.new_empty(mask.shape[0], 1 if mask.shape[1] == 1 else heads[0], *size))
            landing.append(masks[-1])
    swap(messages, landings, group=to.group)
    q, k, v = (_by_row(x) for x in wholes)
    if mine.ragged:
        used = mine.key_heads(k.device)
        k, v = k.index_select(2, used), v.index_select(2, used)
    if mask is None:
        return q, k, v, None
    if to.mask_kind == "keys":
        return q, k, v, torch.cat(masks, 3)
    rows_of = [x.expand(-1, -1, sq, -1) for x, sq in zip(masks, to.q_lengths, strict=True)]
    return q, k, v, torch.cat(rows_of, 2)


def queries_to_heads(tensors: list[Tensor], *, to: Ulysses) -> list[Tensor]:
    """[b, s_local, hq, ...] -> [b, s_group, hq_local, ...], for what is shaped like the queries, at once.

    Ranks: all of `to.group`. Adjoint: `queries_to_tokens`.
    """
    heads = to.mine.q_stop - to.mine.q_start
    wholes = [_rows(x, sum(to.q_lengths), heads) for x in tensors]
    landings = list(zip(*(_by_rank(x, to.q_lengths) for x in wholes), strict=True))
    messages = [[_by_row(x[:, :, share.query]) for x in tensors] for share in to.shares]
    swap(messages, landings, group=to.group)
    return [_by_row(x) for x in wholes]


def queries_to_tokens(tensors: list[Tensor], *, to: Ulysses) -> list[Tensor]:
    """[b, s_group, hq_local, ...] -> [b, s_local, hq, ...], at once.

    Ranks: all of `to.group`. Adjoint: `queries_to_heads`.
    """
    messages = list(zip(*(_by_rank(_by_row(x), to.q_lengths) for x in tensors), strict=True))
    mine, heads = to.q_lengths[dist.get_rank(to.group)], to.shares[-1].q_stop
    wholes = [x.new_empty(x.shape[0], mine, heads, *x.shape[3:]) for x in tensors]
    swap(messages, [[_by_row(x[:, :, share.query]) for x in wholes] for share in to.shares], group=to.group)
    return wholes


def part_to_tokens(part: Part, *, with_lse: bool, to: Ulysses) -> Part:
    """A part over this rank's heads as one over its tokens; without its lse (then empty) unless asked."""
    out, *lse = queries_to_tokens([part.out, part.lse] if with_lse else [part.out], to=to)
    return Part(out, lse[0] if with_lse else part.lse.new_empty(0))


def grads_to_tokens(grads: Grads, hk: int, *, to: Ulysses) -> Grads:
    """Gradients of `tokens_to_heads`' results -> those of its arguments; shares of one head are summed.

    Ranks: all of `to.group`.
    """
    dq, dk, dv = grads
    if to.mine.ragged:
        dk, dv = (_sum_heads(x, to.mine) for x in (dk, dv))
    lengths = (to.q_lengths, to.kv_lengths, to.kv_lengths)
    messages = list(zip(*(_by_rank(_by_row(x), n) for x, n in zip((dq, dk, dv), lengths, strict=True)), strict=True))
    sq, sk = (n[dist.get_rank(to.group)] for n in (to.q_lengths, to.kv_lengths))
    b, _, _, d = dq.shape
    query = dq.new_empty(b, sq, to.shares[-1].q_stop, d)
    keys = [_KeyHeads(x.new_empty(b, sk, hk, d), to.shares) for x in (dk, dv)]
    landings = [
        [_by_row(query[:, :, share.query]), *(_by_row(x.landings[rank]) for x in keys)]
        for rank, share in enumerate(to.shares)
    ]
    swap(messages, landings, group=to.group)
    return Grads(query, *(x.summed() for x in keys))


class _KeyHeads:
    """Key-value heads from the ranks that use them: [b, s, hk_i, d] -> [b, s, hk, d].

    Args: total: where they belong, if no head is used by two ranks; else their shares land beside each other, and are
        summed in float32 or wider.
    """

    def __init__(self, total: Tensor, shares: Sequence[HeadShare]) -> None:
        self._total, self._shares = total, shares
        self._apart = sum(share.k_stop - share.k_start for share in shares) > total.shape[2]
        self.landings = [total[:, :, share.key] for share in shares]
        if self._apart:
            self.landings = [torch.empty_like(x) for x in self.landings]

    def summed(self) -> Tensor:
        x = self._total
        if not self._apart:
            return x
        total = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        for share, part in zip(self._shares, self.landings, strict=True):
            total[:, :, share.key] += part
        return total.to(x.dtype)


def _by_row(x: Tensor) -> Tensor:
    """[b, s, ...] as [s, b, ...], and back."""
    return x.transpose(0, 1)


def _rows(like: Tensor, length: int, heads: int) -> Tensor:
    """Room for [s, b, heads, ...]. Args: like: [b, s, h, ...]."""
    return like.new_empty(length, like.shape[0], heads, *like.shape[3:])


def _by_rank(rows: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(rows, list(lengths))


def _sum_heads(x: Tensor, share: HeadShare) -> Tensor:
    heads = share.key_heads(x.device)
    return x.new_zeros(*x.shape[:2], share.k_stop - share.k_start, x.shape[3]).index_add_(2, heads, x)
