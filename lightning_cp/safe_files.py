"""Write files in folders that others may write to: links that they have planted there are not followed. No torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

PRIVATE = 0o600  # mode of files that may contain passwords or keys of the user


def new_file(path: Path, *, mode: int = 0o666) -> Path:
    """Create an empty file in place of an older file or link, so that writing to `path` follows no link.

    Args: mode: permissions, reduced by the umask.
    Returns: `path`. Raises: OSError: there is a folder, or another process has created something at `path` meanwhile.
    """
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode))
    return path


def no_link(path: str, flags: int) -> int:
    """Open a file, as `opener` of `open`. Raises: OSError: `path` is a link, or no regular file."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} must be a regular file: remove it")
    return descriptor


def make_private(folder: Path, pattern: str = "*") -> None:
    """Let only the owner read the files of a folder. Links are left as they are."""
    for path in folder.glob(pattern):
        if path.is_file() and not path.is_symlink():
            path.chmod(PRIVATE)
