"""Start and watch the processes of a job's ranks; report their events in order. Imports no torch."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto, unique
from typing import IO, Any

from lightning_cp.launch.channel import CHANNEL, Inbox

_TICK_S = 1.0  # interval for looking at the processes: a child of a rank may hold the rank's pipe open
_EXIT_S = 1.0  # wait for a process whose pipe is closed: it exits right after, but may have GPU memory to free


@unique
class EventKind(Enum):
    """The kinds of events."""

    MESSAGE = auto()  # the rank sent a message
    ENDED = auto()  # the rank's pipe was closed, because its process ends
    STOP = auto()  # this process received a stop signal


@dataclass(frozen=True)
class Event:
    """An event of a rank, or of this process (rank -1).

    Attributes: message: the message of a MESSAGE event; the signal's `number` of a STOP event.
    """

    rank: int
    kind: EventKind
    message: Mapping[str, Any] = field(default_factory=dict)


class Processes:
    """The processes of the ranks, each with a pipe to this process that the kernel closes when the rank ends.

    Events come in the order in which the pipes became ready, even if this process could not run for a while.

    Args: stops: reading end of a pipe that gets a byte, its number, for each stop signal. The caller closes it.
    """

    def __init__(self, stops: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._open: dict[int, Inbox] = {}  # rank -> its pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(stops, selectors.EVENT_READ, -1)

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
        rank, inbox = len(self._processes), Inbox(reader)
        self._processes.append(process)
        self._open[rank] = inbox
        self._selector.register(reader, selectors.EVENT_READ, rank)

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait for events, at most `timeout_s` seconds or a second. Returns: the events, oldest first."""
        ready = self._selector.select(min(timeout_s, _TICK_S))
        events = [event for key, _ in ready for event in self._events(key.fd, key.data)]
        if not ready:
            ended = [rank for rank in self._open if self._processes[rank].poll() is not None]
            events = [event for rank in ended for event in self._read(rank, has_ended=True)]
        return events

    def codes(self) -> list[int | None]:
        """Return the exit code of each rank, in rank order; -n for signal n, None before its ENDED event."""
        return [None if rank in self._open else process.poll() for rank, process in enumerate(self._processes)]

    def pids(self) -> list[int]:
        """Return the process id of each rank, in rank order."""
        return [process.pid for process in self._processes]

    def are_running(self) -> bool:
        """Return True if any rank is running."""
        return None in self.codes()

    def signal(self, number: int) -> None:
        """Send a signal to each running rank."""
        for process in self._processes:
            process.send_signal(number)

    def end(self, terminate_s: float) -> None:
        """End all ranks and their children: SIGTERM first, SIGKILL after `terminate_s` seconds."""
        for process in self._processes:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + terminate_s
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_group(process, signal.SIGKILL)
        for process in self._processes:
            _signal_group(process, signal.SIGKILL)  # children that the rank left running
            process.wait()

    def close(self) -> None:
        """Close all descriptors."""
        for inbox in self._open.values():
            os.close(inbox.descriptor)
        self._open.clear()
        self._selector.close()

    def _events(self, descriptor: int, rank: int) -> list[Event]:
        if rank < 0:
            return [Event(-1, EventKind.STOP, {"number": os.read(descriptor, 1)[0]})]
        return self._read(rank)

    def _read(self, rank: int, *, has_ended: bool = False) -> list[Event]:
        messages, is_closed = self._open[rank].read()
        events = [Event(rank, EventKind.MESSAGE, message) for message in messages]
        if not (is_closed or has_ended):
            return events
        descriptor = self._open.pop(rank).descriptor
        self._selector.unregister(descriptor)
        os.close(descriptor)
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(_EXIT_S)
        return [*events, Event(rank, EventKind.ENDED)]


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return  # the group is empty
