"""Ulysses all-to-all: exchange (local tokens, all heads) for (all tokens of the group, some heads), and back.

A KV head goes to every rank that has one of its query heads (see `heads.assign_heads`); its gradients are summed.
Source: Jacobs et al., arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.attention.heads import Heads, JointHeads, tokens_first
from lightning_cp.comm.packet import BUFFERS, as_bytes
from lightning_cp.comm.transfer import exchange
from lightning_cp.kernels import Grads, PartialAttention


def all_to_all(
    messages: Sequence[Sequence[Tensor]], recv_buffers: Sequence[Sequence[Tensor]], *, group: dist.ProcessGroup
) -> None:
    """Send `messages[i]` to rank i of `group`, and receive the message of rank i into `recv_buffers[i]`.

    Contiguous tensors are sent and received without a copy; others are copied through a buffer.

    Args:
        messages: for each rank, the tensors to send.
        recv_buffers: for each rank, tensors with the shapes and dtypes that it sends.
    Ranks: all of `group`. Bytes: those of the tensors.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    peers = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    taken: list[Tensor] = []

    def contiguous(x: Tensor) -> Tensor:
        """Return `x` if it is contiguous, otherwise a buffer of its shape."""
        if x.is_contiguous():
            return x
        taken.append(BUFFERS.take(x.numel() * x.element_size(), x))
        return taken[-1].view(x.dtype).view(x.shape)

    sends, receives, copies = [], [], []
    for target, source in peers:
        for x in messages[target]:
            sent = contiguous(x)
            sends.append((target, as_bytes(sent if sent is x else sent.copy_(x))))
        for recv_buffer in recv_buffers[source]:
            staging = contiguous(recv_buffer)
            receives.append((source, as_bytes(staging)))
            if staging is not recv_buffer:
                copies.append((recv_buffer, staging))
    pending = exchange(sends, receives, group=group)
    for recv_buffer, x in zip(recv_buffers[rank], messages[rank], strict=True):
        recv_buffer.copy_(x)
    pending.wait()
    for recv_buffer, staging in copies:
        recv_buffer.copy_(staging)
    BUFFERS.give(*taken)


@dataclass(frozen=True)
class Ulysses:
    """Settings of one Ulysses exchange.

    Attributes:
        group: process group of the Ulysses ranks.
        rank: index of this rank in `group`.
        heads_by_rank: heads of each rank of `group`.
        q_lengths, kv_lengths: number of queries and of keys on each rank of `group`, in rank order.
        mask_kind: "key_mask", "query_mask" or "" (see `Ring`).
        mask_query_sizes: size of the query dim of each rank's mask.
    """

    group: dist.ProcessGroup
    rank: int
    heads_by_rank: tuple[Heads, ...]
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    mask_kind: str
    mask_query_sizes: tuple[int, ...]

    @property
    def own_heads(self) -> Heads:
        """This rank's heads."""
        return self.heads_by_rank[self.rank]

    @cached_property
    def is_joint(self) -> bool:
        """True if q, k and v are exchanged as one tensor: equal numbers of queries and keys, no mask, no shared head.

        Their heads are then joined per token, so that each rank's tokens are received in place, in one collective.
        """
        num_keys = sum(heads.num_keys for heads in self.heads_by_rank)
        shares_heads = num_keys != self.heads_by_rank[-1].key.stop or any(heads.ragged for heads in self.heads_by_rank)
        return self.q_lengths == self.kv_lengths and not self.mask_kind and not shares_heads

    @cached_property
    def of_queries(self) -> JointHeads:
        """Exchange of a tensor with the query heads only."""
        return JointHeads(self.group, self.rank, self.q_lengths, tuple((h.num_queries,) for h in self.heads_by_rank))

    @cached_property
    def of_all(self) -> JointHeads:
        """Exchange of q, k and v, if `is_joint`."""
        heads = tuple((h.num_queries, h.num_keys, h.num_keys) for h in self.heads_by_rank)
        return JointHeads(self.group, self.rank, self.q_lengths, heads)


def tokens_to_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, to: Ulysses
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Exchange q, k and v, [b, s_local, h, d] -> [b, s_group, h_local, d], and their mask, in one all-to-all.

    The results are views of [s_group, b, h_local, d], so that each rank's tokens are received in place. K and V are
    repeated to one head per query head if the heads are ragged (`Heads.ragged`).
    Ranks: all of `to.group`; each sends its tokens' (hq + 2 hk) d elements, except for its own heads.
    Adjoint: `grads_to_tokens`.
    """
    if to.is_joint:
        return *to.of_all.own(to.of_all.to_heads([q, k, v])), None  # type: ignore[return-value]
    lengths, own_heads = (to.q_lengths, to.kv_lengths, to.kv_lengths), to.own_heads
    heads = (own_heads.num_queries, own_heads.num_keys, own_heads.num_keys)
    outputs = [_empty_tokens_first(x, sum(n), h) for x, n, h in zip((q, k, v), lengths, heads, strict=True)]
    recv_buffers = [list(buffers) for buffers in zip(*map(_by_rank, outputs, lengths), strict=True)]
    messages = [[tokens_first(x) for x in rank_heads.of(q, k, v)] for rank_heads in to.heads_by_rank]
    masks: list[Tensor] = []
    if mask is not None:
        sent_masks, masks = _mask_messages(mask, to)
        for message, recv_buffer, sent, received in zip(messages, recv_buffers, sent_masks, masks, strict=True):
            message.append(sent)
            recv_buffer.append(received)
    all_to_all(messages, recv_buffers, group=to.group)
    q, k, v = (tokens_first(x) for x in outputs)
    if own_heads.ragged:
        kv_heads = own_heads.key_of_each(k.device)
        k, v = k.index_select(2, kv_heads), v.index_select(2, kv_heads)
    return q, k, v, None if mask is None else _join_masks(masks, to)


def _mask_messages(mask: Tensor, to: Ulysses) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each rank the mask to send (its heads, our tokens) and a buffer to receive (our heads, its tokens)."""
    shared_by_heads = mask.shape[1] == 1
    received = []
    for sk, mask_queries in zip(to.kv_lengths, to.mask_query_sizes, strict=True):
        size = (1, sk) if to.mask_kind == "key_mask" else (mask_queries, mask.shape[3])
        received.append(mask.new_empty(mask.shape[0], 1 if shared_by_heads else to.own_heads.num_queries, *size))
    return [mask if shared_by_heads else mask[:, rank_heads.query] for rank_heads in to.heads_by_rank], received


def _join_masks(masks: Sequence[Tensor], to: Ulysses) -> Tensor:
    if to.mask_kind == "key_mask":
        return torch.cat(list(masks), 3)
    return torch.cat([x.expand(-1, -1, sq, -1) for x, sq in zip(masks, to.q_lengths, strict=True)], 2)


def queries_to_heads(tensors: list[Tensor], *, to: Ulysses) -> list[Tensor]:
    """Exchange tensors shaped like queries, [b, s_local, hq, ...] -> [b, s_group, hq_local, ...], in one all-to-all.

    Ranks: all of `to.group`. Adjoint: `queries_to_tokens`.
    """
    if len(tensors) == 1:
        return [tokens_first(to.of_queries.to_heads(tensors))]
    outputs = [_empty_tokens_first(x, sum(to.q_lengths), to.own_heads.num_queries) for x in tensors]
    recv_buffers = list(zip(*(_by_rank(x, to.q_lengths) for x in outputs), strict=True))
    messages = [[tokens_first(x[:, :, rank_heads.query]) for x in tensors] for rank_heads in to.heads_by_rank]
    all_to_all(messages, recv_buffers, group=to.group)
    return [tokens_first(x) for x in outputs]


def queries_to_tokens(tensors: list[Tensor], *, to: Ulysses) -> list[Tensor]:
    """Exchange tensors shaped like queries, [b, s_group, hq_local, ...] -> [b, s_local, hq, ...], in one all-to-all.

    Ranks: all of `to.group`. Adjoint: `queries_to_heads`.
    """
    if len(tensors) == 1:
        return to.of_queries.to_tokens(tensors[:])
    messages = list(zip(*(_by_rank(tokens_first(x), to.q_lengths) for x in tensors), strict=True))
    length, heads = to.q_lengths[to.rank], to.heads_by_rank[-1].query.stop
    outputs = [x.new_empty(x.shape[0], length, heads, *x.shape[3:]) for x in tensors]
    recv_buffers = [[tokens_first(x[:, :, rank_heads.query]) for x in outputs] for rank_heads in to.heads_by_rank]
    all_to_all(messages, recv_buffers, group=to.group)
    return outputs


def partial_to_tokens(part: PartialAttention, *, with_lse: bool, to: Ulysses) -> PartialAttention:
    """Exchange out and lse of this rank's heads for those of its tokens; lse is empty unless `with_lse`.

    Ranks: all of `to.group`, with equal `with_lse`.
    """
    out, *lse = queries_to_tokens([part.out, part.lse] if with_lse else [part.out], to=to)
    return PartialAttention(out, lse[0] if with_lse else part.lse.new_empty(0))


def grads_to_tokens(grads: list[Tensor], *, to: Ulysses) -> Grads:
    """Exchange gradients of the results of `tokens_to_heads` for gradients of its arguments; sum shared KV heads.

    Args: grads: gradients of q, k and v; emptied, see `JointHeads.to_tokens`.
    Ranks: all of `to.group`.
    """
    if to.is_joint:
        return Grads(*to.of_all.to_tokens(grads))
    dq, dk, dv = grads
    grads.clear()
    if to.own_heads.ragged:
        dk, dv = (_sum_heads(x, to.own_heads) for x in (dk, dv))
    lengths = (to.q_lengths, to.kv_lengths, to.kv_lengths)
    messages = list(
        zip(*(_by_rank(tokens_first(x), n) for x, n in zip((dq, dk, dv), lengths, strict=True)), strict=True)
    )
    rank, (b, _, _, d) = to.rank, dq.shape
    hq, hk = to.heads_by_rank[-1].query.stop, to.heads_by_rank[-1].key.stop
    query = dq.new_empty(b, to.q_lengths[rank], hq, d)
    if sum(rank_heads.num_keys for rank_heads in to.heads_by_rank) == hk:
        key, value = (x.new_empty(b, to.kv_lengths[rank], hk, d) for x in (dk, dv))
        recv_buffers = [[tokens_first(x) for x in rank_heads.of(query, key, value)] for rank_heads in to.heads_by_rank]
        all_to_all(messages, recv_buffers, group=to.group)
        return Grads(query, key, value)
    keys, values = (
        [_empty_tokens_first(x, to.kv_lengths[rank], rank_heads.num_keys) for rank_heads in to.heads_by_rank]
        for x in (dk, dv)
    )
    queries = [tokens_first(query[:, :, rank_heads.query]) for rank_heads in to.heads_by_rank]
    all_to_all(messages, list(zip(queries, keys, values, strict=True)), group=to.group)
    return Grads(query, *(_sum_shared_heads(x, to.heads_by_rank) for x in (keys, values)))


def _sum_shared_heads(grads: Sequence[Tensor], heads_by_rank: Sequence[Heads]) -> Tensor:
    """Sum the gradients of KV heads that several ranks use: from each rank [s, b, hk_i, d] -> [b, s, hk, d]."""
    (s, b, _, d), dtype = grads[0].shape, grads[0].dtype
    total = grads[0].new_zeros(b, s, heads_by_rank[-1].key.stop, d, dtype=torch.promote_types(dtype, torch.float32))
    for rank_heads, grad in zip(heads_by_rank, grads, strict=True):
        total[:, :, rank_heads.key] += tokens_first(grad)
    return total.to(dtype)


def _empty_tokens_first(like: Tensor, length: int, heads: int) -> Tensor:
    """Allocate [length, b, heads, ...]. Args: like: [b, s, h, ...]."""
    return like.new_empty(length, like.shape[0], heads, *like.shape[3:])


def _by_rank(x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(x, list(lengths))


def _sum_heads(x: Tensor, own_heads: Heads) -> Tensor:
    heads = own_heads.key_of_each(x.device)
    return x.new_zeros(*x.shape[:2], own_heads.num_keys, x.shape[3]).index_add_(2, heads, x)
