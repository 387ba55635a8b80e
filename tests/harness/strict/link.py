"""A rank's connection to the coordinator: posts operations, waits for them, and checks the memory that they use."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.strict.memory import memory, overlap
from tests.harness.strict.messages import (
    Done,
    Ended,
    Failed,
    FirstUse,
    Look,
    Operation,
    Posted,
    Released,
    Resumes,
    Strict,
    StrictError,
    Waits,
)
from tests.harness.strict.stacks import look, where

_FILL = 0xFF


class StrictWork(dist.Work):
    """Handle of an operation. Its receive buffers hold 0xFF until `wait`."""

    def __init__(
        self,
        link: Link,
        operation: Operation,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        fill: Callable[[Sequence[bytes | None]], None],
    ) -> None:
        super().__init__()
        self.operation, self.done, self.released = operation, threading.Event(), threading.Event()
        self._link, self._fill, self._held = link, fill, (list(reads), list(writes))
        self.writes = [memory(x) for x in writes]
        self.reads = [x for x in map(memory, reads) if not any(overlap(x, y) for y in self.writes)]
        self._copies = [x.copy() for x in self.reads]
        self._data: Sequence[bytes | None] = ()
        self._future: Any = None

    def begin(self) -> None:
        """Overwrite the receive buffers."""
        for x in self.writes:
            x.fill(_FILL)

    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation is done, then fill the receive buffers."""
        if self.writes or self._link.strict.sends_block:
            self._link.block(self, self.done, for_first_use=False)
            self.finish()
        return True

    def finish(self) -> None:
        """Check that nobody has changed the buffers since the post, and fill the receive buffers."""
        with self._link.lock:
            if self not in self._link.running:
                return
            self._link.running.discard(self)
        if any(np.any(x != _FILL) for x in self.writes):
            raise StrictError(f"a receive buffer was written to before wait: {self.operation}")
        if any(np.any(x != y) for x, y in zip(self.reads, self._copies, strict=True)):
            raise StrictError(f"a send buffer was changed before wait: {self.operation}")
        self._fill(self._data)
        self._held = ([], [])

    def complete(self, data: Sequence[bytes | None]) -> None:
        """Note that the operation is done; in the thread that receives messages."""
        self._data = data
        self.done.set()
        self._complete_future()

    def get_future(self) -> Any:
        """Return a future that is complete when the operation is done. DDP waits for it."""
        self._future = torch.futures.Future()
        if self.done.is_set():
            self._complete_future()
        return self._future

    def _complete_future(self) -> None:
        with self._link.lock:
            future = None if self._future is None or self._future.done() else self._future
            written = self._held[1]
            if future is None:
                return
            try:
                self.finish()
                future.set_result(written)
            except Exception as error:
                future.set_exception(error)

    def is_completed(self) -> bool:
        """Return True if `wait` would not block."""
        return self.done.is_set()

    def is_success(self) -> bool:
        """Return True if the operation is done."""
        return self.done.is_set()

    def result(self) -> list[Tensor]:
        """Return the receive buffers."""
        return self._held[1]


class Link:
    """Connection of this rank to the coordinator, from the begin to the end of a job."""

    def __init__(self, address: str, rank: int, strict: Strict) -> None:
        self.strict, self.rank = strict, rank
        self.lock = threading.RLock()
        self.running = WeakSet[StrictWork]()  # a work that is done may be dropped without `wait`
        self._fault = ""
        self._works: dict[int, StrictWork] = {}
        self._used: set[FirstUse] = set()
        self._numbers = itertools.count()
        self._connection = Client(address, "AF_UNIX")
        self._connection.send(rank)
        self._thread = threading.Thread(target=self._receive, name="strict link", daemon=True)
        self._thread.start()

    def close(self, *, error: bool) -> None:
        """End the job. Args: error: the function has failed on this rank."""
        self._send(Ended(error))
        self._thread.join()
        self._connection.close()

    def post(
        self,
        operation: dict[str, Any],
        first_uses: Sequence[FirstUse],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        fill: Callable[[Sequence[bytes | None]], None],
    ) -> StrictWork:
        """Post an operation, and block the host until what it uses for the first time is used on all members.

        Args:
            operation: fields of `Operation`, except its number, first uses and place.
            first_uses: all that it uses. reads, writes: its buffers. fill: writes the received bytes to them.
        """
        with self.lock:
            number, place = next(self._numbers), where(sys._getframe(1))
            new = tuple(use for use in dict.fromkeys(first_uses) if use not in self._used)
            self._used.update(new)
            work = StrictWork(
                self, Operation(number=number, first_uses=new, where=place, **operation), reads, writes, fill
            )
            self._check_buffers(work)
            work.begin()
            self.running.add(work)
            self._works[number] = work
            self._send(Posted(work.operation))
        if new:
            self.block(work, work.released, for_first_use=True)
        return work

    def block(self, work: StrictWork, event: threading.Event, *, for_first_use: bool) -> None:
        """Block this thread until an event of an operation. Raises: StrictError: a fault was found on some rank."""
        if not event.is_set() and not self._fault:
            thread = threading.get_ident()
            self._send(Waits(thread, work.operation.number, for_first_use))
            event.wait()
            self._send(Resumes(thread))
        if self._fault:
            raise StrictError(self._fault)

    def _check_buffers(self, new: StrictWork) -> None:
        for old in self.running:
            pairs = [(x, y) for x in new.writes for y in [*old.writes, *old.reads]]
            if any(overlap(x, y) for x, y in [*pairs, *((x, y) for x in new.reads for y in old.writes)]):
                raise StrictError(f"a buffer in use is used again:\n  {old.operation}\n  {new.operation}")

    def _send(self, message: object) -> None:
        with self.lock, _errors_of_the_connection():
            self._connection.send(message)

    def _receive(self) -> None:
        message: object = None
        while not isinstance(message, Ended):
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                message = Failed(self._fault or "the coordinator has ended")
            if isinstance(message, Done):
                self._complete(message)
            elif isinstance(message, Released):
                self._works_released(message.number)
            elif isinstance(message, Look):
                self._send(look())
            elif isinstance(message, Failed):
                self._fault = message.text
                for work in [*self._works.values(), *self.running]:
                    work.released.set()
                    work.done.set()
                if message.text.endswith("coordinator has ended"):
                    return

    def _complete(self, message: Done) -> None:
        self._works.pop(message.number).complete(message.data)

    def _works_released(self, number: int) -> None:
        with self.lock:
            for work in [*self._works.values(), *self.running]:
                if work.operation.number == number:
                    work.released.set()


@contextmanager
def _errors_of_the_connection() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StrictError("the coordinator has ended") from error
