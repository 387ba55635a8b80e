"""Ranks that end with the process that started them, however that one ends.

The launcher holds the write end of a pipe and each rank the read end. When the launcher is gone, even by SIGKILL, the
kernel closes the write end, and a thread of each rank ends its whole process group: the rank and what it started. (A
death signal asked of the kernel, PR_SET_PDEATHSIG, would come first and leave a rank's own children running.)
"""

import os
import signal
import threading


def hold_on_to_launcher(read_end: int) -> None:
    """Ends this process and its group when the launcher has ended.

    Args:
        read_end: file descriptor of the pipe whose write end only the launcher holds.
    """
    threading.Thread(target=_wait_for_end, args=(read_end,), name="lifeline", daemon=True).start()


def _wait_for_end(read_end: int) -> None:
    while os.read(read_end, 1):  # nothing is ever written: this returns at end of file
        pass
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
