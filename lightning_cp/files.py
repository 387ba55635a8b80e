"""Read and write files where others may write too: regular files only, no planted links, errors with the path."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

PRIVATE = 0o600  # mode of files that may contain passwords or keys of the user
_SAFETENSORS_CODE = re.compile(r"\(os error (\d+)\)")
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class NotRegularError(OSError):
    """A named pipe, socket or device where a regular file is expected: reading it could wait forever."""


def check_regular(path: str | Path) -> None:
    """Raise OSError unless a path is a regular file, or a link to one."""
    _check(path, os.stat(path).st_mode)


def why_not_regular(path: str | Path) -> str:
    """Return for an error why a path is no regular file: "does not exist", "is a folder", "is a named pipe", …"""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return "does not exist"
    return "is a folder" if stat.S_ISDIR(mode) else f"is {_kind(mode)}"


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading in binary mode.

    Raises: OSError: the file cannot be opened. NotRegularError: it is a named pipe, a socket or a device.
    """
    check_regular(path)  # before it is opened: to open a device can change it
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, *, limit_bytes: int = 1 << 32) -> bytes:
    """Return the contents of a regular file.

    Raises: see `open_regular`. OSError: the file is larger than the limit; no memory is allocated for it.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:  # for example a sparse file, which takes no space on the disk
            raise OSError(errno.EFBIG, f"it has {size} bytes, but may have at most {limit_bytes}", str(path))
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises: ValueError: it is not valid JSON, not UTF-8, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: ValueError: the file is missing, no regular file, or damaged; names it."""
    try:
        content = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read: {' '.join(str(reason).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def new_file(path: Path, *, mode: int = 0o666) -> Path:
    """Create an empty file in place of an older file or link, so that writing to `path` follows no link.

    Args: mode: permissions, reduced by the umask.
    Returns: `path`.
    Raises: OSError: `path` is a folder, or another process creates it at the same time. See also `check_links`.
    """
    check_links(path)
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode))
    return path


def check_links(path: Path) -> None:
    """Raise OSError if a folder of a path is a link that a stranger has put there: files would be written elsewhere.

    A link is followed if it is owned by this user, by root, or by the owner of the folder that contains it.
    """
    for folder in path.absolute().parents:
        if folder.is_symlink() and _owner(folder) not in (os.geteuid(), 0, _owner(f"{folder.parent}/.")):
            reason = f"its folder {folder} is a link of another user, which is not followed: give the path it leads to"
            raise OSError(errno.ELOOP, reason, path)


def _owner(path: Path | str) -> int:
    return os.lstat(path).st_uid


def no_link(path: str, flags: int) -> int:
    """Open a file, as `opener` of `open`. Raises: OSError: `path` is a link, or no regular file. See `check_links`."""
    check_links(Path(path))
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} must be a regular file: remove it")
    return descriptor


@contextmanager
def writing(path: str | Path, kept: str = "") -> Iterator[None]:
    """Raise OSError with a path instead of any error of the disk: an open file that is full does not name it.

    An error that names a path itself is reported with that one.

    Args: kept: what is not lost, as a sentence.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, _WriteError):
            raise
        named = error.filename2 or error.filename or path  # the first one is the source of a copy
        raise write_error(named, error.strerror or str(error), error.errno, kept) from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        code = _SAFETENSORS_CODE.search(str(error))  # not in the message of every version
        raise write_error(path, str(error), int(code[1]) if code else None, kept) from error


@contextmanager
def writing_new(path: Path, kept: str = "", *, mode: int = 0o666) -> Iterator[Path]:
    """Yield the path of an empty file to write, see `new_file`; errors of the disk name it, see `writing`."""
    with writing(path, kept):
        yield new_file(path, mode=mode)


class _WriteError(OSError):
    """An error with a complete message, which `writing` leaves unchanged."""


def write_error(path: object, reason: str, code: int | None, kept: str = "") -> OSError:
    """Return the error of a file that could not be written. Args: code: of `errno`. kept: see `writing`."""
    error = _WriteError(f"{path} could not be written: {reason}{'. ' if kept else ''}{kept}")
    error.errno = code  # not in the constructor: it would choose another class, and put the number before the text
    return error


def _check(path: str | Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, but must be a file", str(path))
    if not stat.S_ISREG(mode):
        raise NotRegularError(errno.EINVAL, f"it is {_kind(mode)}, but must be a regular file", str(path))


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a special file")
