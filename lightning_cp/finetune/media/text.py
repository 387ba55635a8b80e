"""Read text files of a training set."""

from __future__ import annotations

from pathlib import Path

from lightning_cp.errors import DataError
from lightning_cp.files import read_regular
from lightning_cp.finetune.media.limits import TABLE_BYTES


def read_text(file: Path, *, limit_bytes: int = TABLE_BYTES) -> str:
    """Read a UTF-8 file. A byte order mark is dropped; Windows line ends are kept for the parser.

    Raises: DataError: the file cannot be read, is too large or is not UTF-8.
    """
    try:
        return read_regular(file, limit_bytes=limit_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text (byte 0x{error.object[error.start]:02x} at offset {error.start}): "
            "save it with the encoding UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def lines_of(text: str) -> list[str]:
    """Split at line ends only. str.splitlines also splits at form feeds and Unicode separators inside of a caption."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def is_unicode(text: str) -> bool:
    """Return False if a text has characters that no encoding can write, such as undecodable bytes of a file name."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
