"""Lock folders with `flock` while their process runs, and remove folders of ended processes."""

import errno
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from lightning_cp.files import writing
from lightning_cp.locks import lock, unlock

_OWNER = ".owner"
_IDLE_S, _FOREIGN_IDLE_S = 5.0, 3600.0  # long for other hosts: some file systems do not share locks


def lock_new_folder(make: Callable[[], Path]) -> tuple[Path, int]:
    """Make a folder and lock it (shared `flock`).

    Args: make: function that makes a new folder; called again if another process removed it before it was locked.
    Returns: the folder, and the descriptor of its lock.
    """
    while True:
        folder, descriptor = make(), -1
        try:
            descriptor, _ = lock(folder, shared=True)  # without locks `remove_abandoned` removes only with `at_once`
            with writing(folder / _OWNER), open(folder / _OWNER, "x", encoding="utf-8") as owner:
                owner.write(socket.gethostname())
            return folder, descriptor
        except BaseException as error:
            unlock(descriptor)
            if isinstance(error, OSError) and error.errno == errno.ENOENT:
                continue  # it was removed
            shutil.rmtree(folder, ignore_errors=True)
            raise


def remove_owner_file(folder: Path) -> None:
    """Remove the file that names the folder's owner host."""
    (folder / _OWNER).unlink(missing_ok=True)


def remove_abandoned(folders: Iterable[Path], *, at_once: bool = False) -> None:
    """Remove this user's folders left by processes that have ended.

    Args: at_once: True if only one process may write here: every unlocked folder is removed. False: a folder without
        an owner must be unchanged for some seconds, and a folder of another host for an hour.
    """
    for folder in folders:
        with suppress(OSError):  # gone already, not readable, or locked by its process
            if folder.lstat().st_uid == os.getuid():
                _remove_abandoned(folder, at_once=at_once)


def _remove_abandoned(folder: Path, *, at_once: bool) -> None:
    descriptor, no_locks = lock(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        if at_once or (no_locks is None and time.time() - changed > _wait_s(folder)):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        unlock(descriptor)


def _wait_s(folder: Path) -> float:
    owner = folder / _OWNER
    name = owner.read_text(encoding="utf-8", errors="replace") if owner.is_file() else ""
    if not name:  # it is being made, or its process was killed before it wrote the name
        return _IDLE_S
    return -1.0 if name == socket.gethostname() else _FOREIGN_IDLE_S
