"""Exchange of the keys that a sparse mask needs: each rank sends each other rank only the keys of its blocks.

All ranks know the table of the mask, so they know what to send and receive without asking. One slice of heads is in
transit while the one before is computed. A rank's own keys come first, so that the first transfer overlaps too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.attention.heads import Heads, tokens_first
from lightning_cp.attention.sparse.mask import EMPTY, SparseMask
from lightning_cp.comm.packet import BUFFERS
from lightning_cp.comm.transfer import Pending, exchange_flat
from lightning_cp.kernels import Grads


@dataclass(frozen=True, eq=False)
class Needs:
    """What the ranks of a ring need of each other's keys.

    Attributes:
        sent: places of the keys to send among this rank's, rank after rank, int64 on the device.
        sent_counts, received_counts: number of keys to send to, and receive from, each rank of the ring.
        received: places of the received keys among the ring's, int64 on the host.
        largest: number of keys that the rank with the most needs receives.
    """

    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    received: Tensor
    largest: int


def find_needs(
    mask: SparseMask,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    *,
    rank: int,
    heads: slice,
    device: torch.device,
) -> Needs:
    """Find what each rank needs from the table of the mask.

    Args: queries, keys: positions that each rank of the ring holds. heads: heads of the table that this ring computes.
    """
    some = (mask.kinds[:, heads] > EMPTY).flatten(0, 1).any(0)  # [blocks of queries, blocks of keys]
    needed = torch.stack([some[torch.unique(x // mask.block_size[0])].any(0) for x in queries])  # [ranks, blocks]
    blocks = [x // mask.block_size[1] for x in keys]
    held = torch.stack([torch.bincount(x, minlength=some.shape[1]) for x in blocks])  # number of keys [ranks, blocks]
    counts = (needed.double() @ held.double().T).fill_diagonal_(0)  # that a rank (row) needs of another one (column)
    none, starts = torch.empty(0, dtype=torch.int64, device="cpu"), [0, *accumulate(map(len, keys))]

    def places(owner: int, reader: int) -> Tensor:
        return none if owner == reader else needed[reader][blocks[owner]].nonzero()[:, 0]

    ranks = range(len(keys))
    sent = [places(rank, reader) for reader in ranks]
    received = [places(owner, rank) + starts[owner] for owner in ranks]
    return Needs(
        torch.cat(sent).to(device),
        [len(x) for x in sent],
        [len(x) for x in received],
        torch.cat(received),
        int(counts.sum(1).max()),
    )


def needed_keys(
    k: Tensor, v: Tensor, slices: Sequence[Heads], needs: Needs, *, group: dist.ProcessGroup
) -> Iterator[tuple[Heads, Callable[[], tuple[Tensor, Tensor]]]]:
    """Yield each slice of heads, and a function that waits for the K and V received, [b, keys, heads, d].

    They are valid until the next slice is requested.

    Args: k, v: this rank's, [b, sk_local, hk, d].
    Ranks: all of `group`. Each sends the K and V that the others need.
    """

    def start(heads: Heads) -> tuple[Tensor, Tensor, Pending]:
        shape = (k.shape[0], 2 * heads.num_keys, k.shape[3])
        sent, received = (_take(sum(counts), shape, k) for counts in (needs.sent_counts, needs.received_counts))
        chosen = [tokens_first(x[:, :, heads.key]).index_select(0, needs.sent) for x in (k, v)]
        torch.cat(chosen, 2, out=sent.view(k.dtype).view(-1, *shape))
        return sent, received, _exchange(sent, received, needs.sent_counts, needs.received_counts, group)

    def wait(heads: Heads, received: Tensor, pending: Pending) -> tuple[Tensor, Tensor]:
        pending.wait()
        joined = received.view(k.dtype).view(-1, k.shape[0], 2 * heads.num_keys, k.shape[3])
        keys, values = torch.split(tokens_first(joined), heads.num_keys, 2)
        return keys, values

    following = start(slices[0])
    for index, heads in enumerate(slices):
        sent, received, pending = following
        if index + 1 < len(slices):
            following = start(slices[index + 1])
        yield heads, partial(wait, heads, received, pending)
        BUFFERS.give(sent, received)


class NeededGradReducer:
    """Return the gradients of received keys to their owners and sum them there; one slice of heads is in transit."""

    def __init__(self, k: Tensor, dtype: torch.dtype, needs: Needs, *, group: dist.ProcessGroup) -> None:
        self._needs, self._group, self._dtype = needs, group, k.dtype
        self._totals = [k.new_zeros(k.shape, dtype=dtype) for _ in range(2)]
        self._pending: tuple[Tensor, Tensor, Heads, Pending] | None = None

    def send(self, heads: Heads, piece_grads: list[tuple[int, Grads]]) -> None:
        """Add the gradients of this rank's keys, and start to send those of received keys; 0 if they are not given.

        Args: piece_grads: (start of the keys, gradients); a negative start stands for the received keys.
        Ranks: all of the group.
        """
        self._receive()
        others = None
        for first, grads in piece_grads:
            if first < 0:
                others = grads
                continue
            for total, x in zip(self._totals, grads[1:], strict=True):
                total[:, :, heads.key].add_(x)
        (b, _, _, d), dtype = self._totals[0].shape, self._totals[0].dtype
        shape, needs = (b, 2 * heads.num_keys, d), self._needs
        sent, received = (
            _take(n, shape, self._totals[0]) for n in (sum(needs.received_counts), sum(needs.sent_counts))
        )
        joined = sent.view(dtype).view(-1, *shape)
        if others is None:
            joined.zero_()
        else:
            torch.cat([tokens_first(x).to(dtype) for x in others[1:]], 2, out=joined)
        pending = _exchange(sent, received, needs.received_counts, needs.sent_counts, self._group)
        self._pending = (sent, received, heads, pending)

    def finish(self) -> list[Tensor]:
        """Return dK and dV of this rank's keys in their dtype, summed over ranks, [b, s, hk, d]."""
        self._receive()
        return [x.to(self._dtype) for x in self._totals]

    def _receive(self) -> None:
        if self._pending is None:
            return
        sent, received, heads, pending = self._pending
        pending.wait()
        (b, _, _, d), dtype = self._totals[0].shape, self._totals[0].dtype
        joined = tokens_first(received.view(dtype).view(-1, b, 2 * heads.num_keys, d))
        counts = self._needs.sent_counts
        for places, grads in zip(
            torch.split(self._needs.sent, counts), torch.split(joined, counts, 1), strict=True
        ):  # no place twice
            for total, x in zip(self._totals, torch.split(grads, heads.num_keys, 2), strict=True):
                total[:, :, heads.key].index_add_(1, places, x)
        BUFFERS.give(sent, received)
        self._pending = None


def _take(tokens: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    b, h, d = shape
    return BUFFERS.take(tokens * b * h * d * like.element_size(), like)


def _exchange(
    sent: Tensor, received: Tensor, sent_counts: list[int], received_counts: list[int], group: dist.ProcessGroup
) -> Pending:
    """Start the all-to-all of buffers that hold these numbers of tokens for each rank."""
    sizes = []
    for buffer, counts in ((sent, sent_counts), (received, received_counts)):
        bytes_of_token = buffer.numel() // max(sum(counts), 1)
        sizes.append([n * bytes_of_token for n in counts])
    return exchange_flat(sent, received, (sizes[0], sizes[1]), group=group)
