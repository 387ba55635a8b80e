"""Report failures of image and video libraries as MediaError, with the file and the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_cp.errors import MediaError
from lightning_cp.files import NotRegularError

_LONGEST_REASON = 300  # characters; some libraries quote a part of the file


@contextmanager
def failures_of(file: Path) -> Iterator[None]:
    """Raise MediaError that names the file instead of any other exception.

    Decoders raise nearly every built-in exception on damaged files, so the type says nothing. MemoryError and
    exceptions that are no `Exception` (KeyboardInterrupt) pass unchanged.
    """
    try:
        yield
    except MemoryError:
        raise
    except MediaError as error:
        if str(error).startswith(f"{file}: "):
            raise
        raise MediaError(f"{file}: {error}") from error.__cause__
    except Exception as error:
        raise MediaError(f"{file}: {_reason(file, error)}") from error


def _reason(file: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "the file does not exist"
    if isinstance(error, IsADirectoryError):
        return "expected a file, but this is a folder"
    if isinstance(error, PermissionError) and not os.access(file, os.R_OK):
        return "no permission to read the file"
    if isinstance(error, NotRegularError):
        return f"cannot be read: {error.strerror}"
    text = " ".join(str(error).split())[:_LONGEST_REASON]
    return f"cannot be decoded ({type(error).__name__}: {text})"
