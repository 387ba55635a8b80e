"""Lock a cache while a run writes it, also against runs on other hosts."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_cp.errors import CacheError
from lightning_cp.files import open_regular, read_regular, writing_new
from lightning_cp.finetune.latent_cache.row_checks import DamagedError, parse
from lightning_cp.locks import lock, unlock

OWNER = ".owner.json"
_BEAT_S, _WATCH_S = 5.0, 45.0  # the owner changes the time of its file; another host watches that long for a change


def lock_file(path: Path, flags: int) -> int:
    """Open and lock a file; see `lock`. Raises: CacheError: it is a link, for example of a stranger."""
    try:
        return lock(path, flags | os.O_NOFOLLOW)[0]
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CacheError(f"{path} is a link, which is not followed: remove it") from error
        raise


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
            self._descriptor, no_locks = lock(folder)  # which may be a link of the user
        except BlockingIOError as error:
            raise CacheError(_in_use(folder, "")) from error
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._beat, daemon=True)
        try:
            _check_owner(folder, has_locks=no_locks is None)
        except BaseException:
            unlock(self._descriptor)
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
            unlock(self._descriptor)

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


def _check_owner(folder: Path, *, has_locks: bool) -> None:
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
