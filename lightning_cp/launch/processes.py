"""Start and watch the processes of a job's ranks; report their events in order. Imports no torch."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto, unique
from typing import IO, Any

from lightning_cp.launch.channel import CHANNEL, Inbox

_TICK_S = 0.05  # polling interval on systems without pidfd


@unique
class EventKind(Enum):
    """The kinds of events."""

    MESSAGE = auto()  # the rank sent a message
    CLOSED = auto()  # the rank's pipe was closed: the rank is ending
    ENDED = auto()  # the rank's process has ended
    STOP = auto()  # this process received a stop signal


@dataclass(frozen=True)
class Event:
    """An event of a rank, or of this process (rank -1).

    Attributes: message: the message of a MESSAGE event; the signal's `number` of a STOP event.
    """

    rank: int
    kind: EventKind
    message: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    inbox: Inbox | None
    pidfd: int | None


class Processes:
    """The processes of the ranks, each with a pipe to this process.

    On Linux one `epoll` waits for messages, closed pipes and ended processes. It returns events in the order in which
    they happened, even if this process could not run for a while.

    Args: stops: reading end of a pipe that gets a byte, its number, for each stop signal. The caller closes it.
    """

    def __init__(self, stops: int) -> None:
        self._ranks: list[_Rank] = []
        self._stops = stops
        self._owners: dict[int, int] = {}  # descriptor -> rank
        self._epoll = select.epoll() if hasattr(select, "epoll") and hasattr(os, "pidfd_open") else None
        self._poller: Any = self._epoll or select.poll()
        self._poller.register(stops, select.POLLIN)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: IO[bytes] | None,
        inherited: Sequence[int],
    ) -> None:
        """Start the next rank in a new session.

        Args:
            command: program and arguments.
            environment: environment variables of the rank; the variable with its pipe is added.
            output: file for stdout and stderr; None: those of this process.
            inherited: file descriptors that stay open in the rank.
        """
        reader, writer = os.pipe()
        try:
            process = subprocess.Popen(
                command,
                env={**environment, CHANNEL: str(writer)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writer, *inherited),
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._add(process, reader)

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait for events, at most `timeout_s` seconds. Returns: the events, oldest first."""
        deadline = time.monotonic() + timeout_s
        while True:
            events = [event for descriptor in self._ready(deadline) for event in self._events(descriptor)]
            if self._has_polling():
                events += [event for rank in range(len(self._ranks)) for event in self._look_at(rank)]
                events = _ended_first(events)
            if events or time.monotonic() >= deadline:
                return events

    def codes(self) -> list[int | None]:
        """Return the exit code of each rank, in rank order; -n for signal n, None while it runs."""
        return [rank.process.returncode for rank in self._ranks]

    def pids(self) -> list[int]:
        """Return the process id of each rank, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    def are_running(self) -> bool:
        """Return True if any rank is running."""
        return None in self.codes()

    def signal(self, number: int) -> None:
        """Send a signal to each running rank."""
        for rank in self._ranks:
            if rank.process.returncode is None:
                rank.process.send_signal(number)

    def end(self, terminate_s: float) -> None:
        """End all ranks and their children: SIGTERM first, SIGKILL after `terminate_s` seconds."""
        for rank in self._ranks:
            _signal_group(rank.process, signal.SIGTERM)
        deadline = time.monotonic() + terminate_s
        for rank in self._ranks:
            try:
                rank.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_group(rank.process, signal.SIGKILL)
        for rank in self._ranks:
            _signal_group(rank.process, signal.SIGKILL)  # children that the rank left running
            rank.process.wait()

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self._owners:
            os.close(descriptor)
        self._owners.clear()
        if self._epoll is not None:
            self._epoll.close()

    def _add(self, process: subprocess.Popen[bytes], reader: int) -> None:
        number, pidfd = len(self._ranks), None
        if self._epoll is not None:
            try:
                pidfd = os.pidfd_open(process.pid)
            except OSError:  # not supported or not permitted by the kernel: `wait` polls instead
                pidfd = None
        self._ranks.append(_Rank(process, Inbox(reader), pidfd))
        for descriptor in (reader, pidfd):
            if descriptor is None:
                continue
            self._owners[descriptor] = number
            self._poller.register(descriptor, select.POLLIN)

    def _has_polling(self) -> bool:
        return any(rank.pidfd is None and rank.process.returncode is None for rank in self._ranks)

    def _ready(self, deadline: float) -> list[int]:
        left_s = max(0.0, deadline - time.monotonic())
        if self._has_polling():
            left_s = min(left_s, _TICK_S)
        ready = self._poller.poll(1000 * left_s) if self._epoll is None else self._epoll.poll(left_s)
        return [descriptor for descriptor, _ in ready]

    def _events(self, descriptor: int) -> list[Event]:
        if descriptor == self._stops:
            return [Event(-1, EventKind.STOP, {"number": os.read(descriptor, 1)[0]})]
        number = self._owners.get(descriptor)
        if number is None:  # closed by an earlier event of the same poll
            return []
        rank = self._ranks[number]
        return self._read(number) if rank.inbox and descriptor == rank.inbox.descriptor else self._look_at(number)

    def _read(self, number: int) -> list[Event]:
        inbox = self._ranks[number].inbox
        if inbox is None:
            return []
        messages, closed = inbox.read()
        events = [Event(number, EventKind.MESSAGE, message) for message in messages]
        if closed:
            self._forget(inbox.descriptor)
            self._ranks[number].inbox = None
            events.append(Event(number, EventKind.CLOSED))
        return events

    def _look_at(self, number: int) -> list[Event]:
        rank = self._ranks[number]
        if rank.process.returncode is not None or rank.process.poll() is None:
            return []
        if rank.pidfd is not None:
            self._forget(rank.pidfd)
            rank.pidfd = None
        return [*self._read(number), Event(number, EventKind.ENDED)]

    def _forget(self, descriptor: int) -> None:
        del self._owners[descriptor]
        self._poller.unregister(descriptor)
        os.close(descriptor)


def _ended_first(events: Sequence[Event]) -> list[Event]:
    """Sort the events of one polling interval, whose order in time is unknown.

    Ranks that have ended without a message come first, then ranks that have ended with one, then ranks that only sent
    messages. The events of each rank stay in their order.
    """
    ended = {event.rank for event in events if event.kind is not EventKind.MESSAGE}
    speaking = {event.rank for event in events if event.kind is EventKind.MESSAGE}
    return sorted(events, key=lambda event: (event.rank not in ended, event.rank in speaking))


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return  # the group is empty
