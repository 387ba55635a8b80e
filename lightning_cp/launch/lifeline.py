"""Ranks that end with the process that started them, however that one ends.

The launcher holds the write end of a pipe and each rank the read end. When the launcher is gone, even by SIGKILL, the
kernel closes the write end and a thread of the rank ends its whole process group. On Linux the kernel is asked as well,
for the case that this thread cannot run.
"""

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def hold_on_to_parent(read_end: int, parent_pid: int) -> None:
    """Ends this process and its group when the parent has ended.

    Args:
        read_end: file descriptor of the pipe whose write end only the parent holds.
        parent_pid: of the process that holds it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before the request was made
            end_group()
    threading.Thread(target=_wait_for_end, args=(read_end,), name="lifeline", daemon=True).start()


def end_group() -> None:
    """Ends this process and, where it leads a group of its own, all that it started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(read_end: int) -> None:
    while os.read(read_end, 1):  # nothing is ever written: this returns at end of file
        pass
    end_group()
