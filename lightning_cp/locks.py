"""Lock files and folders with `flock`: the kernel unlocks them when the last process with the descriptor ends."""

from __future__ import annotations

import fcntl
import functools
import os
from pathlib import Path

_held: dict[int, bool] = {}  # descriptors of this process that hold a lock -> whether forked processes keep it


def lock(
    path: Path, flags: int = os.O_RDONLY | os.O_DIRECTORY, *, shared: bool = False, by_children: bool = False
) -> tuple[int, OSError | None]:
    """Open and lock a file or folder, until `unlock` or the end of this process.

    Args:
        flags: flags of `os.open`.
        shared: False: exclusive lock. True: wait for a shared one, which several processes can hold.
        by_children: True: forked processes hold it too. False: they close it, because a DataLoader worker that outlives
            its killed parent would hold it.
    Returns: the descriptor, and None, or why it is not locked: most often, the file system has no locks.
    Raises: BlockingIOError: another process, or this one, holds the lock. OSError: the path cannot be opened.
    """
    descriptor, error = os.open(path, flags | os.O_CLOEXEC, 0o666), None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError as has_none:
        error = has_none
    _watch_forks()
    _held[descriptor] = by_children
    return descriptor, error


def unlock(descriptor: int) -> None:
    """Close a descriptor of `lock`. Does nothing if this process does not hold it."""
    if _held.pop(descriptor, None) is not None:
        os.close(descriptor)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_close_in_child)


def _close_in_child() -> None:
    for descriptor in [descriptor for descriptor, by_children in _held.items() if not by_children]:
        unlock(descriptor)
