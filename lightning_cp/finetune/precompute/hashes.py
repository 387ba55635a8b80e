"""Hash source files, to notice files that change."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from pathlib import Path
from threading import Lock

from lightning_cp.errors import MediaError
from lightning_cp.files import open_regular
from lightning_cp.finetune.media import Source

State = tuple[tuple[int, int, int], ...]  # inode, size and time of change of each file of a source


class FileHashes:
    """Hashes of the contents of files. Each file is read once, also if many clips are cut from it; thread-safe."""

    def __init__(self) -> None:
        self._locks: defaultdict[Path, Lock] = defaultdict(Lock)
        self._known: dict[Path, tuple[tuple[int, int, int], str]] = {}

    def of(self, source: Source) -> str:
        """Return the hash of a source's files, and of its own sizes if it has some.

        Raises: MediaError: a file cannot be read.
        """
        found = [self._hash(file) for file in source.files]
        if source.sizes is not None:
            found.append(str(sorted(set(source.sizes))))
        return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest()

    def _hash(self, file: Path) -> str:
        with self._locks[file]:
            state = _state(file)
            known = self._known.get(file)
            if known is None or known[0] != state:
                try:
                    with open_regular(file) as opened:
                        known = state, hashlib.file_digest(opened, "sha256").hexdigest()
                except OSError as error:
                    raise MediaError(f"{file}: cannot be read: {error.strerror or error}") from error
                self._known[file] = known
            return known[1]


def state_of(source: Source) -> State:
    """Return inode, size and time of change of a source's files. Raises: MediaError: a file no longer exists."""
    return tuple(_state(file) for file in source.files)


def _state(file: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(file)
    except OSError as error:
        raise MediaError(f"{file}: cannot be read: {error.strerror or error}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns
