"""Point-to-point exchange and all-gather: the two primitives on which all communication here is built.

Tests count their calls, and dry runs observe them (`observing`). gloo transfers host memory only, so buffers on other
devices are then copied through the host.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from lightning_cp.comm.stats import STATS
from lightning_cp.mesh.groups import cuda_backend_is


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer that starts.

    Attributes:
        number: number of the transfer in this process, see `Pending.number`.
        group: its process group.
        sent, received: (rank within the group, buffer), also of this rank's own part of a collective.
    """

    number: int
    group: dist.ProcessGroup
    sent: tuple[tuple[int, Tensor], ...]
    received: tuple[tuple[int, Tensor], ...]


class TransferObserver(Protocol):
    """Called in the thread that communicates."""

    def started(self, transfer: Transfer) -> None:
        """A transfer starts: its buffers are in use until it was waited for."""

    def waited(self, number: int) -> None:
        """The wait for a transfer is over."""

    def gathered(self, values: list[int], group: dist.ProcessGroup) -> list[list[int]] | None:
        """Answer instead of the other ranks for `all_gather_ints`; None: ask them."""


class _Observed:
    observer: TransferObserver | None = None


OBSERVED = _Observed()


@contextmanager
def observing(observer: TransferObserver) -> Iterator[None]:
    """Tell `observer` of all transfers of this process in the context."""
    before, OBSERVED.observer = OBSERVED.observer, observer
    try:
        yield
    finally:
        OBSERVED.observer = before


# Names in a profile, followed by the number of the exchange: it runs from its EXCHANGE mark to its WAIT mark.
EXCHANGE, WAIT = "lightning_cp::exchange", "lightning_cp::wait"

_UNMARKED = nullcontext()

# torch 2.11 has only the old name; later versions deprecate it.
all_gather_tensor: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class Pending:
    """A transfer in progress; received buffers may be read, and sent buffers reused, after `wait`."""

    number: int = 0
    works: Sequence[dist.Work] = ()
    recv_buffers: Sequence[tuple[Tensor, Tensor]] = ()  # (host buffer, device buffer)
    kept_alive: Sequence[Tensor] = ()

    def staged(self, sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """Return the buffers to send from and receive into: on the host if the backend needs it. Keeps both alive."""
        if not sent.is_cpu:
            sent, target = _host(sent, group), _recv_buffer(received, group)
            if target is not received:
                self.recv_buffers = [(target, received)]
                received = target
        self.kept_alive = (sent, received)
        return sent, received

    def wait(self) -> None:
        """Block until done (on CUDA with NCCL: make the current stream wait)."""
        if not self.works:
            return
        started = time.perf_counter()
        with _marked(WAIT, self.number):
            for work in self.works:
                work.wait()
        STATS.waited_s += time.perf_counter() - started
        for host, device in self.recv_buffers:
            device.copy_(host)
        if OBSERVED.observer is not None:
            OBSERVED.observer.waited(self.number)
        self.works = self.recv_buffers = self.kept_alive = ()


def exchange(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], *, group: dist.ProcessGroup
) -> Pending:
    """Start to send to and receive from peers; empty buffers are skipped.

    Args: sends, receives: (rank within `group`, buffer).
    Ranks: each peer, with matching sends and receives in the same order.
    """
    pending = _begin(sum(buffer.numel() * buffer.element_size() for _, buffer in sends))
    kept_alive: list[Tensor] = []
    copies: list[tuple[Tensor, Tensor]] = []
    operations: list[dist.P2POp] = []
    for peer, buffer in sends:
        if buffer.numel():
            kept_alive.append(_host(buffer, group))
            operations.append(dist.P2POp(dist.isend, kept_alive[-1], group=group, group_peer=peer))
    for peer, buffer in receives:
        if buffer.numel():
            recv_buffer = _recv_buffer(buffer, group)
            if recv_buffer is not buffer:
                copies.append((recv_buffer, buffer))
            operations.append(dist.P2POp(dist.irecv, recv_buffer, group=group, group_peer=peer))
    pending.kept_alive, pending.recv_buffers = kept_alive, copies
    if OBSERVED.observer is not None and operations:
        OBSERVED.observer.started(Transfer(pending.number, group, tuple(sends), tuple(receives)))
    if operations:
        with _marked(EXCHANGE, pending.number):
            pending.works = dist.batch_isend_irecv(operations)
    return pending


def exchange_flat(
    sent: Tensor, received: Tensor, sizes_bytes: tuple[list[int], list[int]] | None, *, group: dist.ProcessGroup
) -> Pending:
    """Start an all-to-all in one collective: each rank's bytes follow each other in the buffers, in rank order.

    Args:
        sent, received: uint8 buffers. Their parts for this rank itself are copied.
        sizes_bytes: size of each rank's part in `sent`, and in `received`; None: all parts have the same size.
    Ranks: all of `group`, with matching sizes.
    """
    if sizes_bytes is None:
        if not sent.numel():
            return Pending()
        sizes: tuple[list[int], list[int]] | tuple[None, None] = (None, None)
        bytes_kept = sent.numel() // group.size()
    else:
        sizes, bytes_kept = sizes_bytes, sizes_bytes[0][group.rank()]
    pending = _begin(sent.numel() - bytes_kept)
    if OBSERVED.observer is not None:
        parts = sizes_bytes or ([bytes_kept] * group.size(),) * 2
        pairs = [tuple(enumerate(torch.split(x, n))) for x, n in zip((sent, received), parts, strict=True)]
        OBSERVED.observer.started(Transfer(pending.number, group, *pairs))
    source, target = pending.staged(sent, received, group)
    with _marked(EXCHANGE, pending.number):
        pending.works = [dist.all_to_all_single(target, source, sizes[1], sizes[0], group=group, async_op=True)]
    return pending


def gather_flat(mine: Tensor, received: Tensor, sizes_bytes: Sequence[int], *, group: dist.ProcessGroup) -> Pending:
    """Start an all-gather: each rank's bytes follow each other in the result, in rank order.

    Args:
        mine: uint8 [sizes_bytes[rank]].
        received: uint8 [sum(sizes_bytes)]; this rank's part is copied to it too.
    Ranks: all of `group`, with equal `sizes_bytes`. One collective if the sizes are equal, otherwise an `exchange`.
    """
    rank, size = dist.get_rank(group), len(sizes_bytes)
    if not received.numel():
        return Pending()
    if sizes_bytes.count(sizes_bytes[0]) == size:
        pending = _begin(mine.numel() * (size - 1))
        if OBSERVED.observer is not None:
            sent = tuple((peer, mine) for peer in range(size))
            parts = torch.split(received, list(sizes_bytes))
            OBSERVED.observer.started(Transfer(pending.number, group, sent, tuple(enumerate(parts))))
        source, target = pending.staged(mine, received, group)
        with _marked(EXCHANGE, pending.number):
            pending.works = [all_gather_tensor(target, source, group=group, async_op=True)]
        return pending
    parts = torch.split(received, list(sizes_bytes))
    parts[rank].copy_(mine)
    others = [(rank + step) % size for step in range(1, size)]
    return exchange([(peer, mine) for peer in others], [(peer, parts[peer]) for peer in reversed(others)], group=group)


def _begin(sent_bytes: int) -> Pending:
    STATS.collectives += 1
    STATS.sent_bytes += sent_bytes
    return Pending(number=STATS.collectives)


def _marked(name: str, number: int) -> AbstractContextManager[object]:
    return record_function(f"{name} {number}") if STATS.traced else _UNMARKED


def all_gather_ints(values: list[int], *, group: dist.ProcessGroup) -> list[list[int]]:
    """All-gather a short list of ints, in rank order. Synchronises the host.

    Ranks: all of `group`.
    """
    if OBSERVED.observer is not None:
        answer = OBSERVED.observer.gathered(values, group)
        if answer is not None:
            return answer
    if dist.get_backend(group) == "fake":
        return [values] * dist.get_world_size(group)
    device = "cuda" if cuda_backend_is("nccl", group) else "cpu"
    by_rank = torch.zeros(dist.get_world_size(group), len(values), dtype=torch.int64, device=device)
    by_rank[dist.get_rank(group)] = torch.tensor(values, dtype=torch.int64, device=device)
    # No other transfer here is an all-reduce. gloo ends the process if an all-gather meets one of another size.
    dist.all_reduce(by_rank, group=group)
    answers: list[list[int]] = by_rank.tolist()
    return answers


def all_gather_floats(values: Sequence[float], *, group: dist.ProcessGroup) -> list[tuple[float, ...]]:
    """All-gather a short list of float64 numbers, bit for bit, in rank order; see `all_gather_ints`."""
    floats, ints = f"{len(values)}d", f"{len(values)}q"
    by_rank = all_gather_ints(list(struct.unpack(ints, struct.pack(floats, *values))), group=group)
    return [struct.unpack(floats, struct.pack(ints, *bits)) for bits in by_rank]


def _goes_through_host(buffer: Tensor, group: dist.ProcessGroup) -> bool:
    return buffer.device.type != "cpu" and cuda_backend_is("gloo", group)


def _host(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    return buffer.cpu() if _goes_through_host(buffer, group) else buffer


def _recv_buffer(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    return torch.empty_like(buffer, device="cpu") if _goes_through_host(buffer, group) else buffer
