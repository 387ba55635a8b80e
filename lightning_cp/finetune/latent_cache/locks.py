"""Lock a cache while a run writes it, also against runs on other hosts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_cp.checkpoint.check import DamagedError, parse
from lightning_cp.errors import CacheError
from lightning_cp.files import open_regular, read_regular, writing_new

OWNER = ".owner.json"
_BEAT_S, _WATCH_S = 5.0, 45.0  # the owner changes the time of its file; another host watches that long for a change
_held: set[int] = set()  # descriptors of this process that hold a lock
_registered = threading.Event()


def lock_file(path: Path, flags: int) -> tuple[int, bool]:
    """Open a file or folder and lock it (exclusive `flock`), until the descriptor is closed or the process ends.

    Returns: the descriptor, and whether the file system has locks.
    Raises: BlockingIOError: another process, or this one, holds the lock. CacheError: it is a link to a file.
    """
    follows = flags & os.O_DIRECTORY  # a folder may be a link of the user; files in it may not
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | (0 if follows else os.O_NOFOLLOW), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CacheError(f"{path} is a link, which is not followed: remove it") from error
        raise
    has_locks = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        has_locks = False
    if not _registered.is_set():
        os.register_at_fork(after_in_child=_close_in_child)
        _registered.set()
    _held.add(descriptor)
    return descriptor, has_locks


def unlock_file(descriptor: int) -> None:
    """Close a descriptor of `lock_file`."""
    _held.discard(descriptor)
    os.close(descriptor)


def _close_in_child() -> None:
    """Close the locks' descriptors: a DataLoader worker that outlives its killed parent would keep them locked."""
    while _held:
        os.close(_held.pop())


class FolderLock:
    """Lock a folder for one run.

    The lock is an `flock` on the folder. Some file systems do not share locks between hosts, and some have none: a file
    also names the owner's host and process, and a thread changes its time every 5 seconds. The lock of an ended
    process is taken over. The owner on another host counts as ended if its file does not change for 45 seconds.

    Args: folder: an existing folder.
    Raises: CacheError: another run is writing it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / OWNER
        try:
            self._descriptor, has_locks = lock_file(folder, os.O_RDONLY | os.O_DIRECTORY)
        except BlockingIOError as error:
            raise CacheError(_in_use(folder, "")) from error
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._beat, daemon=True)
        try:
            _check_owner(folder, has_locks)
        except BaseException:
            unlock_file(self._descriptor)
            raise

    def write_owner(self, facts: Mapping[str, Any]) -> None:
        """Write the owner file with further plain values, and keep it fresh until `release`."""
        owner = {"host": socket.gethostname(), "pid": os.getpid(), **facts}
        with writing_new(self._path.with_name(f".tmp{OWNER}")) as scratch:
            scratch.write_text(json.dumps(owner), encoding="utf-8")
            os.rename(scratch, self._path)
        if self._thread.ident is None:
            self._thread.start()

    def release(self) -> None:
        """Remove the owner file and unlock the folder. Does nothing the second time."""
        if self._stop.is_set():
            return
        self._stop.set()
        try:
            if self._thread.ident is not None:
                self._thread.join()
                self._path.unlink(missing_ok=True)
        finally:
            unlock_file(self._descriptor)

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_S):
            try:
                os.utime(self._path)
            except OSError:
                return  # the folder was removed: the next write of the run reports it


def read_owner(folder: Path) -> dict[str, Any] | None:
    """Return the contents of the owner file; None if there is none, {} if it is damaged."""
    try:
        return parse(read_regular(folder / OWNER))
    except FileNotFoundError:
        return None
    except (OSError, DamagedError):
        return {}


def owner_text(folder: Path) -> str:
    """Return the host and process that the owner file names, in words; "" if there is none."""
    owner = read_owner(folder)
    if owner is None:
        return ""
    return f"process {str(owner.get('pid'))[:20]} on host {str(owner.get('host'))[:80]}" if owner else "another run"


def _check_owner(folder: Path, has_locks: bool) -> None:
    """Raise CacheError if the run that the owner file names may still be running. Its lock was free, or unusable."""
    owner = read_owner(folder)
    if not owner:
        return
    if owner.get("host") == socket.gethostname():
        if not has_locks and owner.get("pid") != os.getpid() and _is_running(owner.get("pid")):
            raise CacheError(_in_use(folder, ""))
        return
    start, first = time.monotonic(), _changed_at_ns(folder)
    while time.monotonic() - start < _WATCH_S:
        time.sleep(min(1.0, _WATCH_S / 4))
        now = _changed_at_ns(folder)
        if now is None:
            return  # the owner has ended
        if now != first:
            raise CacheError(_in_use(folder, " (the owner is on another host, and its file still changes)"))


def _changed_at_ns(folder: Path) -> int | None:
    try:
        with open_regular(folder / OWNER) as file:  # open asks an NFS server for the time; stat alone may not
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _is_running(pid: Any) -> bool:
    if type(pid) is not int:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs as another user
    return True


def _in_use(folder: Path, detail: str) -> str:
    owner = owner_text(folder) or "another run"
    return f"{folder} is being written by {owner}{detail}: wait until it has ended, or choose another output"
