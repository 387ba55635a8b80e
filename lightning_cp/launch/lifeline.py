"""End the ranks when their launcher ends, for whatever reason.

The launcher holds the write end of a pipe and each rank holds the read end. When the launcher ends, even by SIGKILL,
the kernel closes the write end. A thread in each rank then kills its whole process group: the rank and its children.
(PR_SET_PDEATHSIG would kill the rank first and leave its children running.)
"""

import functools
import os
import signal
import sys
import threading
import time
from contextlib import suppress

_POLL_S = 1.0


def end_with_launcher(read_end: int) -> None:
    """Kill this process and its process group when the launcher has ended.

    Args:
        read_end: file descriptor of the pipe's read end; only the launcher holds the write end.
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
