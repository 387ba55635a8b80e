"""A rank's connection to the coordinator: posts operations, waits for them, and checks the memory that they use."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.strict import messages
from tests.harness.strict.data import is_ours_alone, memory, overlap, storage_of
from tests.harness.strict.messages import FirstUse, Operation, Strict, StrictError
from tests.harness.strict.stacks import look, where

_FILL = 0xFF

Fill = Callable[[Sequence[Tensor], Sequence[bytes | None]], None]  # writes what members sent to the receive buffers


class StrictWork(dist.Work):
    """Handle of an operation. Its receive buffers hold 0xFF until `wait`."""

    def __init__(
        self, link: Link, operation: Operation, reads: Sequence[Tensor], writes: Sequence[Tensor], fill: Fill | None
    ) -> None:
        super().__init__()
        self.operation, self.done, self.released = operation, threading.Event(), threading.Event()
        self._link, self._fill, self._written = link, fill, list(writes) if fill is not None else []
        self._storages = [storage_of(x) for x in (*reads, *writes)]
        self.writes = [memory(x) for x in writes]
        self.reads = [x for x in map(memory, reads) if not any(overlap(x, y) for y in self.writes)]
        self._copies = [x.copy() for x in self.reads]
        self._data: Sequence[bytes | None] = ()
        self._future: Any = None
        for x in self.writes:
            x.fill(_FILL)

    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation is done, then fill the receive buffers."""
        if self.writes or self._link.strict.sends_block:
            self._link.block(self)
            self._finish()
        return True

    def _finish(self) -> None:
        """Check that nobody has changed the buffers since the post, and fill the receive buffers."""
        with self._link.lock:
            if self not in self._link.running or self._link.fault:
                return
            self._link.running.discard(self)
            self._link._unread.pop(self.operation.number, None)
        if any(np.any(x != _FILL) for x in self.writes):
            raise StrictError(f"a receive buffer was written to before wait: {self.operation}")
        if any(np.any(x != y) for x, y in zip(self.reads, self._copies, strict=True)):
            raise StrictError(f"a send buffer was changed before wait: {self.operation}")
        if self._fill is None and any(map(is_ours_alone, self._storages)):
            raise StrictError(f"a buffer was freed before wait: {self.operation}")
        if self._fill is not None and self.writes:
            self._fill(self._written, self._data)
        elif self.writes:
            for x, received in zip(self.writes, self._data, strict=True):
                x[:] = np.frombuffer(received or b"", np.uint8)
        self._written, self._storages = [], []

    def complete(self, data: Sequence[bytes | None]) -> None:
        """Note that the operation is done, or that a fault was found; in the thread that receives messages."""
        with self._link.lock:
            self._data = data
            self.done.set()
            if self._future is not None:
                self._complete_future()

    def get_future(self) -> Any:
        """Return a future that is complete when the operation is done. DDP waits for it."""
        with self._link.lock:
            self._future = torch.futures.Future()
            if self.done.is_set():
                self._complete_future()
            return self._future

    def _complete_future(self) -> None:
        written = self._written
        try:
            self._finish()
        except StrictError as fault:
            self._link.report(str(fault))
        self._future.set_result(written)  # DDP crashes if it is an exception; the next operation raises the fault

    def is_completed(self) -> bool:
        """Return True if `wait` would not block."""
        return self.done.is_set()

    is_success = is_completed

    def result(self) -> list[Tensor]:
        """Return the receive buffers."""
        return self._written


class Link:
    """Connection of this rank to the coordinator, from the begin to the end of a job."""

    def __init__(self, address: str, rank: int, strict: Strict) -> None:
        self.strict, self.rank = strict, rank
        self.lock = threading.RLock()
        self.running = WeakSet[StrictWork]()  # a collective that is done may be dropped without `wait`
        self._unread: dict[int, StrictWork] = {}  # transfers that receive, until `wait`
        self.fault = ""
        self._works: dict[int, StrictWork] = {}
        self._used: set[FirstUse] = set()
        self._numbers = itertools.count()
        self._connection = Client(address, "AF_UNIX")
        self._connection.send(rank)
        self._received: SimpleQueue[object] = SimpleQueue()
        self._threads = [
            threading.Thread(target=x, name="strict link", daemon=True) for x in (self._receive, self._take)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, *, error: bool) -> None:
        """End the job. Args: error: the function has failed on this rank."""
        if not (error or self.fault) and self._unread:
            self._send(messages.Failed(f"never waited for: {next(iter(self._unread.values())).operation}"))
        self._send(messages.Ended(error))
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def post(
        self,
        operation: dict[str, Any],
        first_uses: Sequence[FirstUse],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        fill: Fill | None,
    ) -> StrictWork:
        """Post an operation, and block the host until what it uses for the first time is used on all members.

        Args:
            operation: fields of `Operation`, except its number, first uses and place.
            first_uses: all that it uses. reads, writes: its buffers. fill: writes the received bytes to them; None for
                transfers, whose buffers the caller must keep until `wait`.
        """
        with self.lock:
            if self.fault:  # the coordinator would not run it
                raise StrictError(self.fault)
            number, place = next(self._numbers), where(sys._getframe(1))
            new = tuple(use for use in dict.fromkeys(first_uses) if use not in self._used)
            self._used.update(new)
            posted = Operation(number=number, first_uses=new, where=place, **operation)
            work = StrictWork(self, posted, reads, writes, fill)
            self._check_buffers(work)
            self.running.add(work)
            self._works[number] = work
            if fill is None and writes:
                self._unread[number] = work
            self._send(posted)
        if new:
            self.block(work, for_first_use=True)
        return work

    def block(self, work: StrictWork, *, for_first_use: bool = False) -> None:
        """Block this thread until an operation is done or, `for_first_use`, released. Raises: StrictError: a fault."""
        event = work.released if for_first_use else work.done
        if not event.is_set() and not self.fault:
            self._send(messages.Waits(work.operation.number, for_first_use))
            event.wait()
        if self.fault:
            raise StrictError(self.fault)

    def report(self, fault: str) -> None:
        """Send a fault to the coordinator, which sends it to all ranks."""
        self._send(messages.Failed(fault))

    def _check_buffers(self, new: StrictWork) -> None:
        for old in self.running:
            pairs = [(x, y) for x in new.writes for y in [*old.writes, *old.reads]]
            if any(overlap(x, y) for x, y in [*pairs, *((x, y) for x in new.reads for y in old.writes)]):
                raise StrictError(f"a buffer in use is used again:\n  {old.operation}\n  {new.operation}")

    def _send(self, message: object) -> None:
        with self.lock:
            try:
                self._connection.send(message)
            except OSError as error:
                raise StrictError("the coordinator has ended") from error

    def _receive(self) -> None:
        """Read all that comes at once: the coordinator, which blocks until it is read, could not read what is sent."""
        try:
            while not isinstance(message := self._connection.recv(), messages.Ended):
                self._received.put(message)
        except (EOFError, OSError):
            self._received.put(messages.Failed("the coordinator has ended"))
        self._received.put(None)

    def _take(self) -> None:
        for message in iter(self._received.get, None):
            if isinstance(message, messages.Done):
                self._works.pop(message.number).complete(message.data)
            elif isinstance(message, messages.Released):
                with self.lock:
                    for work in self.running:
                        if work.operation.number == message.number:
                            work.released.set()
            elif isinstance(message, messages.Look):
                self._send(look())
            elif isinstance(message, messages.Failed):
                self._fail(message.text)

    def _fail(self, text: str) -> None:
        with self.lock:
            self.fault = self.fault or text
            for work in {*self._works.values(), *self.running}:
                work.released.set()
                work.complete(())
