"""Recorder of one rank: transfers, and the operators that read or write their buffers before the wait."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.buffers import BUFFERS
from lightning_cp.comm.observer import Transfer
from lightning_cp.compat.dispatch_names import StorageWeakRef, TorchDispatchMode, group_among, run_body, schema_of
from lightning_cp.compat.torch_names import process_groups, tree_iter
from lightning_cp.planning.races.events import (
    Access,
    Buffer,
    Channel,
    Communicator,
    Misread,
    Released,
    Started,
    Trace,
    Waited,
    spans_of,
)

_READ_NOTHING = ("new_", "empty", "_unsafe_view", "is_pinned")  # first letters; these use shapes and dtypes only


class Recorder(TorchDispatchMode):
    """Record the events of one rank, on CPU. The bodies of this package's operators are recorded, not their calls.

    What other ranks would send is taken from their traces of an earlier round, if there are any.

    Args:
        rank: rank of this process.
        before: traces of all ranks of the round before; empty in the first round.
        tags: value that fills each named tensor, by the name of an operator's argument ("key": 2.0).
    """

    def __init__(self, rank: int, before: Sequence[Trace], tags: Mapping[str, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(rank)
        self._before, self._tags = before, tags
        self._operator = ""
        self._started = 0
        self._last_waited = 0
        self._in_flight: dict[int, tuple[Started, list[StorageWeakRef]]] = {}  # by number in the process
        self._released: set[int] = set()
        self._received: Counter[Channel] = Counter()

    def started(self, transfer: Transfer) -> None:
        """Record the start of a transfer, and what it sends."""
        self._find_released()
        ranks = dist.get_process_group_ranks(transfer.group)
        pairs = [[(ranks[peer], x) for peer, x in side] for side in (transfer.sent, transfer.received)]
        is_collective = any(peer == self.trace.rank for side in pairs for peer, _ in side)
        sides = [tuple(_buffer(peer, x) for peer, x in side if is_collective or x.numel()) for side in pairs]
        event = self._start(transfer.group, is_collective, sides[0], sides[1])
        for buffer in event.sent:
            channel = event.channel(self.trace.rank, buffer.peer, sends=True)
            content = ctypes.string_at(buffer.storage + buffer.start, buffer.stop - buffer.start)
            self.trace.messages.setdefault(channel, []).append(content)
        tensors = [x for side in pairs for _, x in side]
        self._in_flight[transfer.number] = event, [StorageWeakRef(x.untyped_storage()) for x in tensors if x.numel()]  # type: ignore[no-untyped-call]

    def waited(self, number: int) -> None:
        """Record the wait, and receive what the peers sent in the round before."""
        self._find_released()
        event, storages = self._in_flight.pop(number)
        self.trace.events.append(Waited(event.number))
        self._last_waited = event.number
        is_kept = not any(x.expired() for x in storages)  # type: ignore[no-untyped-call]
        for buffer in event.received:
            channel = event.channel(self.trace.rank, buffer.peer, sends=False)
            index, size = self._received[channel], buffer.stop - buffer.start
            self._received[channel] += 1
            sent = self._before[buffer.peer].messages.get(channel, []) if self._before else []
            if is_kept and size and index < len(sent) and len(sent[index]) == size:
                ctypes.memmove(buffer.storage + buffer.start, sent[index], size)

    def gathered(self, values: list[int], group: dist.ProcessGroup) -> list[list[int]]:
        """Answer with what the other ranks gave in the round before; without it, with this rank's values."""
        event = self._collective(group, "all_gather_ints", 8 * len(values))
        own = self.trace.gathered.setdefault(event.communicator, [])
        index = len(own)
        own.append(list(values))
        by_rank = []
        for rank in event.communicator.ranks:
            given = self._before[rank].gathered.get(event.communicator, []) if self._before else []
            is_known = rank != self.trace.rank and index < len(given) and len(given[index]) == len(values)
            by_rank.append(list(given[index] if is_known else values))
        return by_rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "lightning_cp":
            outer, self._operator = self._operator, self._operator or schema_of(func).name
            try:
                with self:
                    return run_body(func, *args, **kwargs)
            finally:
                self._operator = outer
        if func.namespace == "c10d":
            self._other_collective(func, args)
            if schema_of(func).name == "c10d::alltoall_base_":  # the fake group refuses ranks that send nothing
                args = (args[0].new_empty(0), args[1].new_empty(0), args[2], [], [], *args[5:])
        else:
            self._record(func, args, kwargs)
        return func(*args, **kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any) -> None:
        if not (self._in_flight or self._tags):
            return
        self._find_released()
        storages, schema = self._storages(), schema_of(func)
        name, base = schema.name, schema.name.removeprefix("aten::")
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
        if is_view or base.startswith(_READ_NOTHING) or base.endswith("_like"):
            return
        for argument, x in _tensors(schema, args, kwargs):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if x.numel() and x.is_cpu and x.untyped_storage().data_ptr() in storages:
                self.trace.events.append(Access(name, x.untyped_storage().data_ptr(), spans_of(x), writes))
            if argument.name in self._tags and x.numel():
                self._check_tag(name, argument.name, x)

    def _storages(self) -> set[int]:
        """Return the addresses of storages in flight; 0 for empty buffers."""
        return {x.storage for event, _ in self._in_flight.values() for x in (*event.sent, *event.received)}

    def _check_tag(self, operator: str, argument: str, x: Tensor) -> None:
        wrong = x.detach()[x.detach() != self._tags[argument]]
        if wrong.numel():
            value = float(wrong[0])
            names = [name for name, tag in self._tags.items() if tag == value]
            self.trace.events.append(Misread(operator, argument, names[0] if names else str(value), self._last_waited))

    def _other_collective(self, func: Any, args: Any) -> None:
        """Record a collective that no `Transfer` reports: its order, not its buffers."""
        tensors = [x for x in tree_iter(args) if isinstance(x, Tensor)]
        if tensors and all(x.untyped_storage().data_ptr() in self._storages() for x in tensors):
            return  # of a transfer that was reported
        self._collective(group_among(args), schema_of(func).name, 0)

    def _collective(self, group: dist.ProcessGroup, name: str, size: int) -> Started:
        buffers = tuple(Buffer(peer, 0, 0, size) for peer in dist.get_process_group_ranks(group))
        outer, self._operator = self._operator, f"{self._operator} {name}".lstrip()
        event = self._start(group, True, buffers, buffers)
        self._operator = outer
        self.trace.events.append(Waited(event.number))
        return event

    def _start(
        self, group: dist.ProcessGroup, is_collective: bool, sent: tuple[Buffer, ...], received: tuple[Buffer, ...]
    ) -> Started:
        self._started += 1
        event = Started(self._started, _communicator(group), self._operator, is_collective, sent, received)
        self.trace.events.append(event)
        return event

    def _find_released(self) -> None:
        """Record transfers with a buffer that was freed, or given back to the pool."""
        pooled = {x.untyped_storage().data_ptr() for x in BUFFERS.kept()} if self._in_flight else set()
        for event, storages in self._in_flight.values():
            is_freed = any(x.expired() for x in storages)  # type: ignore[no-untyped-call]
            is_pooled = any(x.storage in pooled for x in (*event.sent, *event.received))
            if (is_freed or is_pooled) and event.number not in self._released:
                self._released.add(event.number)
                how = "freed" if is_freed else "given back to BUFFERS"
                self.trace.events.append(Released(event.number, how))


def _communicator(group: dist.ProcessGroup) -> Communicator:
    ranks = dist.get_process_group_ranks(group)
    same = [x for x in process_groups() if dist.get_process_group_ranks(x) == ranks]
    return Communicator(tuple(ranks), same.index(group))


def _buffer(peer: int, x: Tensor) -> Buffer:
    if not x.numel():
        return Buffer(peer, 0, 0, 0)
    ((start, stop),) = spans_of(x)
    return Buffer(peer, x.untyped_storage().data_ptr(), start, stop)


def _tensors(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield (argument of the schema, tensor)."""
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from ((argument, x) for x in tree_iter(value) if isinstance(x, Tensor))
