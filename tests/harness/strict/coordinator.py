"""The coordinator of a strict run: queues as NCCL has them, in the worst case that NCCL allows.

It is a thread of the test's process. Ranks send it each operation with its data when they post it. A rank has a queue
for each communicator (`serial`: one for all), and the first operation of a queue runs. A collective is done when it
runs on all members, a transfer when both sides run: nothing is buffered, so a send waits for its receive.
"""

from __future__ import annotations

import os
import tempfile
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import combinations
from multiprocessing.connection import Connection, Listener, wait

from tests.harness.strict import messages
from tests.harness.strict.matching import Running, check_equal, matched
from tests.harness.strict.messages import FirstUse, Look, Operation, Strict, StrictError, Waits

_QUIET_S = 0.5  # without a message; then the coordinator looks at the ranks
_IDLE_LOOKS = 12  # in a row in which the ranks that do not wait here do not work either: they wait elsewhere


class Coordinator:
    """Runs the operations of the ranks of one job, and finds faults and hangs.

    Attributes:
        address: where ranks connect. fault: the first fault; empty if there is none.
    """

    def __init__(self, world: int, strict: Strict) -> None:
        self._world, self._strict = world, strict
        self._folder = tempfile.TemporaryDirectory(prefix="strict-")
        self.address = f"{self._folder.name}/coordinator"
        self.fault = ""
        self._listener = Listener(self.address, "AF_UNIX", backlog=world)
        self._ranks: dict[Connection, int] = {}
        self._connections: dict[int, Connection] = {}
        self._queues: dict[tuple[int, str], deque[Running]] = defaultdict(deque)
        self._used: dict[FirstUse, set[int]] = defaultdict(set)
        self._blocked: dict[tuple[int, int], tuple[FirstUse, ...]] = {}
        self._posted: dict[tuple[int, int], Operation] = {}  # by rank and number: not done
        self._waits: dict[int, set[Waits]] = defaultdict(set)
        self._ended: dict[int, bool] = {}  # by rank: it has failed
        self._looks: dict[int, Look] = {}
        self._asked: set[int] = set()  # ranks that have not answered the last look
        self._idle_looks = 0
        self._stop, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="strict coordinator")

    def __enter__(self) -> Coordinator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._wake)
        self._thread.join()
        os.close(self._stop)
        self._listener.close()
        for connection in self._ranks:
            connection.close()
        self._folder.cleanup()

    def _serve(self) -> None:
        sources: list[object] = [self._stop, self._listener._listener._socket]  # type: ignore[attr-defined]
        while True:
            ready = wait([*sources, *self._connections.values()], _QUIET_S)  # type: ignore[list-item]
            if self._stop in ready:
                return
            if not ready:
                self._look()
            for source in ready:
                if not isinstance(source, Connection):
                    connection = self._listener.accept()
                    rank = connection.recv()
                    self._ranks[connection], self._connections[rank] = rank, connection
                    continue
                try:
                    self._take(self._ranks[source], source.recv())
                except (EOFError, OSError):  # the process has ended; the pool reports it
                    self._ended.setdefault(self._ranks[source], True)
                    del self._connections[self._ranks[source]]
                except StrictError as fault:
                    self._fail(str(fault))
                except Exception:  # of the harness
                    self._fail(traceback.format_exc())

    def _take(self, rank: int, message: object) -> None:
        if isinstance(message, Look):
            self._looks[rank] = message
            self._asked.discard(rank)
            if self._asked.isdisjoint(self._active()):
                self._judge()
            return
        self._idle_looks = 0
        if isinstance(message, Waits):
            self._waits[rank].add(message)
        elif isinstance(message, messages.Failed):
            self._fail(message.text)
        elif isinstance(message, messages.Ended):
            self._ended[rank] = message.error
            if len(self._ended) == self._world and not any(self._ended.values()):
                self._check_all_done()
            self._send(rank, message)  # the rank waits for it
        elif isinstance(message, Operation) and not self.fault:
            self._queue(rank, message).append(Running(rank, message))
            self._posted[rank, message.number] = message
            for use in message.first_uses:
                self._used[use].add(rank)
            if message.first_uses:
                self._blocked[rank, message.number] = message.first_uses
            for (blocked, number), uses in list(self._blocked.items()):
                if all(self._used[use] >= set(use.members) for use in uses):
                    del self._blocked[blocked, number]
                    self._send(blocked, messages.Released(number))
            while any(self._advance(on) for on in self._running().values()):
                pass

    def _queue(self, rank: int, operation: Operation) -> deque[Running]:
        return self._queues[rank, "" if self._strict.serial else operation.communicator]

    def _running(self) -> dict[str, dict[int, Running]]:
        """Return the first operation of each queue, by communicator and rank."""
        found: dict[str, dict[int, Running]] = defaultdict(dict)
        for (rank, _), queue in self._queues.items():
            if queue:
                found[queue[0].operation.communicator][rank] = queue[0]
        return found

    def _advance(self, on: dict[int, Running]) -> bool:
        """Run the operations that are the first of their queues on a communicator. Returns: True if one is done."""
        for a, b in combinations(on.values(), 2):
            check_equal(a, b)
        for a in on.values():
            for number, data in matched(a, on):
                a.received[number] = data
        ended = []
        for running in on.values():
            operation = running.operation
            if not operation.kind and len(running.received) == len(operation.transfers):
                order = range(len(operation.transfers))
                ended.append((running, tuple(running.received[i] for i in order if not operation.transfers[i].is_send)))
            elif operation.kind and all(member in on and on[member].operation.kind for member in operation.members):
                own = operation.members.index(running.rank)
                ended.append((running, tuple(on[member].operation.data[own] for member in operation.members)))
        for running, data in ended:
            self._queue(running.rank, running.operation).popleft()
            del self._posted[running.rank, running.operation.number]
            self._send(running.rank, messages.Done(running.operation.number, data))
        return bool(ended)

    def _check_all_done(self) -> None:
        left = [x for queue in self._queues.values() for x in queue]
        if left:
            lines = "\n".join(f"  rank {x.rank}: {x.operation}" for x in left)
            self.fault = self.fault or f"all ranks have ended, but these operations never found their peers:\n{lines}"

    def _active(self) -> list[int]:
        return [rank for rank in self._connections if rank not in self._ended]

    def _waiting(self, rank: int) -> set[Waits]:
        """Return what a rank waits for. If that has happened, it goes on, although it may need time to do so."""
        happens = {True: self._blocked, False: self._posted}
        self._waits[rank] = {x for x in self._waits[rank] if (rank, x.number) in happens[x.for_first_use]}
        return self._waits[rank]

    def _look(self) -> None:
        """Ask the ranks for their state, if one of them waits and all have answered before."""
        active = self._active()
        if self.fault or len(self._ranks) < self._world or not self._asked.isdisjoint(active):
            return
        if any(self._waiting(rank) for rank in active):
            self._asked = set(active)
            for rank in active:
                self._send(rank, Look())

    def _judge(self) -> None:
        """Find a hang: all ranks wait for each other here, or wait elsewhere, because they do not work."""
        elsewhere = [rank for rank in self._active() if not self._waiting(rank)]
        self._idle_looks = 0 if any(look.works for look in self._looks.values()) else self._idle_looks + 1
        if len(elsewhere) < len(self._active()) and self._idle_looks >= (_IDLE_LOOKS if elsewhere else 2):
            self._fail(f"hang: no rank can go on\n{self._wait_graph()}")

    def _wait_graph(self) -> str:
        return "\n".join(line for rank in range(self._world) for line in self._rank_lines(rank))

    def _rank_lines(self, rank: int) -> Iterator[str]:
        if rank in self._ended:
            yield f"rank {rank} has ended"
        for waits in self._waiting(rank):
            yield f"rank {rank} waits for {self._posted.get((rank, waits.number), 'an operation that is done')}"
            for use in self._blocked[rank, waits.number] if waits.for_first_use else ():
                if missing := sorted(set(use.members) - self._used[use]):
                    yield f"  {use}: ranks {missing} have not used it"
        if rank not in self._ended and not self._waiting(rank):
            yield f"rank {rank} waits for no operation; it may wait in an exchange of hosts"
        for (owner, name), queue in self._queues.items():
            if owner == rank and queue:
                yield f"  queue {name or 'of all communicators'}:"
                for x in queue:
                    left = [str(t) for i, t in enumerate(x.operation.transfers) if i not in x.received]
                    yield f"    {x.operation}" + (f"; not done: {', '.join(left)}" if x.received else "")
        if rank in self._looks:
            yield "  stacks:\n" + self._looks[rank].stacks

    def _fail(self, text: str) -> None:
        self.fault = self.fault or text
        for rank in self._active():
            self._send(rank, messages.Failed(self.fault))

    def _send(self, rank: int, message: object) -> None:
        try:
            self._connections[rank].send(message)
        except (KeyError, OSError):  # the process has ended
            self._ended.setdefault(rank, True)
