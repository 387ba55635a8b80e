"""What a rank and its launcher tell each other: messages, stop signals, and the end of the launcher. Imports no torch.

A rank sends messages through an inherited pipe, which needs no disk, so a failure is reported even when all file
systems are full. The kernel closes it when the rank ends for any reason. Linux closes the descriptors of an ending
process from the highest to the lowest, so the pipe gets a high one. The launcher then sees the end of a rank before
other ranks can see and report a lost connection.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

CHANNEL = "LIGHTNING_CP_CHANNEL"  # environment variable: descriptor of the pipe's write end
_SEND_TIMEOUT_S = 5.0  # wait for a launcher that does not read, for instance because it is stopped
_HIGHEST = 4095  # highest descriptor number of the pipe
_POLL_S = 1.0
# SIGTERM: from a launcher or a cluster. SIGINT: from the keyboard. SIGUSR1: from SLURM, before the job's time limit
# (sbatch --signal=USR1@60).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Channel:
    """The write end of the pipe.

    Args: descriptor: file descriptor inherited from the launcher; made non-blocking, and closed in child processes.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = _move_to_high_number(descriptor)
        os.set_blocking(self._descriptor, False)
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any], *, timeout_s: float = _SEND_TIMEOUT_S, wait: bool = True) -> bool:
        """Write one message.

        Args:
            message: JSON-serializable mapping.
            timeout_s: seconds to wait for space in the pipe.
            wait: True: block while another thread writes a message. Use False in a signal handler: it may have
                interrupted that write in its own thread.
        Returns: True if the message was written; False if not, for instance because the launcher has ended.
        """
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            return self._write(f"{json.dumps(message)}\n".encode(), time.monotonic() + timeout_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._descriptor)

    def _write(self, data: bytes, deadline: float) -> bool:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not poll.poll(1000 * left_s):
                    return False
            except OSError:  # the read end is closed
                return False
        return True


class Inbox:
    """Reader of messages from the read end of a pipe. Not thread-safe.

    Args: descriptor: file descriptor of the read end; made non-blocking.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._incomplete_line = b""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Read without blocking. Returns: the messages, and True if the write end is closed."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                return messages, False
            *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
            messages += [message for line in lines if (message := _parse(line)) is not None]
            if not data:
                return messages, True


def open_channel(environ: MutableMapping[str, str]) -> None:
    """Open the channel to the launcher if `environ` has the variable `CHANNEL`, and remove it from `environ`."""
    global _channel
    descriptor = environ.pop(CHANNEL, None)
    if descriptor is not None:
        _channel = Channel(int(descriptor))
        os.register_at_fork(after_in_child=_close_in_child)


def send(message: Mapping[str, Any], *, timeout_s: float = _SEND_TIMEOUT_S, wait: bool = True) -> bool:
    """Send a message to the launcher of this process, see `Channel.send`. Returns: False if there is no launcher."""
    return _channel is not None and _channel.send(message, timeout_s=timeout_s, wait=wait)


def _move_to_high_number(descriptor: int) -> int:
    """Move a descriptor to a number above those of sockets and files opened later. Returns: the new number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, min(_HIGHEST, limit - 1 if limit > 0 else _HIGHEST))
    except OSError:  # no free number: the launcher may then see ends in the wrong order
        os.set_inheritable(descriptor, False)
        return descriptor
    os.close(descriptor)
    return high


def _close_in_child() -> None:
    """Close the pipe in a forked process, for instance a data worker: it may outlive the rank."""
    global _channel
    if _channel is not None:
        _channel.close()
        _channel = None


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # a message that could not be written whole
        return None


_channel: Channel | None = None


def end_with_launcher(read_end: int) -> None:
    """Kill this process and its process group, which has its children, when the launcher has ended, even by SIGKILL.

    (PR_SET_PDEATHSIG would kill the rank first and leave its children running.)

    Args: read_end: file descriptor of the read end of a pipe. Only the launcher holds the write end, which the kernel
        closes.
    """
    threading.Thread(target=_wait_for_end, args=(read_end,), name="lifeline", daemon=True).start()


@functools.cache
def end_with_parent() -> None:
    """End this process and its process group when its parent has ended; a second call does nothing.

    An agent of torchrun that is killed leaves its ranks running, and the ranks of other nodes training with them.
    """
    threading.Thread(target=_wait_for_other_parent, args=(os.getppid(),), name="lifeline", daemon=True).start()


def _wait_for_end(read_end: int) -> None:
    while os.read(read_end, 1):  # nothing is ever written: this returns at end of file
        pass
    _kill()


def _wait_for_other_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    rank = os.environ.get("RANK", "?")
    with suppress(OSError, ValueError):  # the agent's pipe is closed
        print(f"error: torchrun's agent (process {parent}) has ended, so rank {rank} ends", file=sys.stderr, flush=True)
    _kill()


def _kill() -> None:
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Stopped(Exception):
    """Training ended early on a stop signal; its progress is in a checkpoint."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number, self.exit_code = number, 128 + number


class StopRequest:
    """Context that records stop signals instead of letting them end the process.

    Attributes: number: number of the received signal; 0: none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        try:
            self._before = {number: signal.signal(number, self._record) for number in STOP_SIGNALS}
        except ValueError:  # not the main thread, where Python cannot set signal handlers
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        send({"kind": "stop_confirmed"}, timeout_s=0, wait=False)  # the launcher then waits for the checkpoint
