"""Read a CSV or JSONL table of images and videos, and text files."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_cp.errors import DataError
from lightning_cp.files import parse_json, read_regular
from lightning_cp.finetune.media.limits import TABLE_BYTES
from lightning_cp.finetune.media.source import (
    ONE_REFERENCE,
    Entry,
    Skipped,
    Source,
    accepted_suffixes,
    clip_id,
    is_image,
    is_video,
)
from lightning_cp.finetune.settings import REPEATS

TABLE_SUFFIXES = (".csv", ".jsonl")
COLUMNS = ("file", "caption", "captions", "repeats", "start_s", "end_s", "start_frame", "frames", "reference", "mask")
METADATA = ("metadata.jsonl", "metadata.csv")
"""Tables of Hugging Face's imagefolder and videofolder, which lie in the folder of the files."""
_RANGE = ("start_s", "end_s", "start_frame", "frames")


def read_table(table: Path, caption_column: str | None = None) -> tuple[list[Entry], list[Skipped]]:
    """Read the rows of a table; rows with files that do not exist are skipped.

    A table with the column `file_name`, as in Hugging Face's imagefolder, may have other columns, which are not used.

    Args: caption_column: column with the captions; None: `caption` or `captions`, and with `file_name` also `text`.
    Raises: DataError: the table cannot be read, or a row is invalid; names the table, the line and what is expected.
    """
    read = _csv_rows if table.suffix.lower() == ".csv" else _jsonl_rows
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    for line, values in read(table, caption_column):
        row = Row(f"{table}, line {line}", values)
        entry = _entry(table.parent, row)
        missing = [file for file in entry.source.files if not os.path.isfile(file)]
        if missing:
            state = "is no file" if os.path.exists(missing[0]) else "does not exist"
            skipped.append(Skipped(missing[0], f"{state} ({row.where})"))
        else:
            entries.append(entry)
    return entries, skipped


def _entry(folder: Path, row: Row) -> Entry:
    file = row.path("file", folder)
    if file is None:
        raise DataError(f"{row.where}: file is missing: expected a path relative to {folder}")
    if not (is_image(file) or is_video(file)):
        raise DataError(f"{row.where}: file={file.name} has an unknown suffix; usable are {accepted_suffixes()}")
    given = [name for name in _RANGE if row.given(name)]
    if given and is_image(file):
        raise DataError(f"{row.where}: {', '.join(given)} can only be given for videos, but {file.name} is an image")
    start_s, end_s, frame_range = _range(row)
    if isinstance(row.values.get("reference"), list):
        raise DataError(f"{row.where}: reference={row.values['reference']!r} is a list: {ONE_REFERENCE}")
    reference = row.path("reference", folder)
    if reference and not (is_image(reference) or is_video(reference)):
        raise DataError(f"{row.where}: reference={reference.name} must be an image or a video")
    mask = row.path("mask", folder)
    if mask and not is_image(mask):
        raise DataError(f"{row.where}: mask={mask.name} must be an image")
    name = Path(os.path.relpath(file, folder)).as_posix()
    id = clip_id(name, start_s, end_s) if frame_range is None else f"{name}#frame{frame_range[0]}+{frame_range[1]}"
    repeats = row.integer("repeats", least=1, most=REPEATS)
    source = Source(
        id=id,
        file=file,
        captions=row.captions(),
        repeats=1 if repeats is None else repeats,
        start_s=start_s,
        end_s=end_s,
        reference=reference,
        mask=mask,
    )
    return Entry(source, name, row.where, frame_range)


def _range(row: Row) -> tuple[float, float | None, tuple[int, int] | None]:
    """Return start_s, end_s, and the range in frames if it is given in frames."""
    start_frame, frames = row.integer("start_frame", least=0), row.integer("frames", least=1)
    start_s, end_s = row.seconds("start_s"), row.seconds("end_s")
    if start_frame is None and frames is None:
        start_s = start_s or 0.0
        if end_s is not None and end_s <= start_s:
            raise DataError(f"{row.where}: end_s={end_s:g} must be greater than start_s={start_s:g}")
        return start_s, end_s, None
    if start_s is not None or end_s is not None:
        raise DataError(f"{row.where}: give a clip as start_s and end_s, or as start_frame and frames, not both")
    if frames is None:
        raise DataError(f"{row.where}: start_frame needs frames, the number of frames of the clip")
    return 0.0, None, (start_frame or 0, frames)


def _csv_rows(table: Path, caption_column: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of the first line of each row, and its non-empty cells by column of `COLUMNS`."""
    reader = csv.reader(io.StringIO(read_text(table), newline=""), strict=True)
    header, ours = list[str](), dict[str, str]()
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{table}, line {line}: not valid CSV ({error}); quote cells that hold commas") from error
        if cells is None:
            break
        if not any(cell.strip() for cell in cells):
            continue
        if not header:
            header = [cell.strip() for cell in cells]
            ours = _our_columns(f"{table}, line {line}", header, "columns", caption_column)
            continue
        if len(cells) != len(header):
            raise DataError(
                f"{table}, line {line}: expected {len(header)} cells ({', '.join(header)}), got {len(cells)}; "
                "quote cells that hold commas"
            )
        filled = {name: cell for name, cell in zip(header, cells, strict=True) if cell.strip()}
        yield line, {ours[name]: cell for name, cell in filled.items() if name in ours}
    if not header:
        raise DataError(f"{table} is empty: expected a header with the columns {', '.join(COLUMNS[:2])}, and rows")


def _jsonl_rows(table: Path, caption_column: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the values by key of `COLUMNS` of each non-empty line, without null values."""
    for line, text in enumerate(lines_of(read_text(table)), start=1):
        if not text.strip():
            continue
        where = f"{table}, line {line}"
        try:
            row = parse_json(text)
        except ValueError as error:
            raise DataError(f'{where}: not valid JSON ({error}); expected {{"file": …, "caption": …}}') from error
        if not isinstance(row, dict):
            raise DataError(f'{where}: expected an object {{"file": …, "caption": …}}, got {type(row).__name__}')
        ours = _our_columns(where, list(row), "keys", caption_column)
        yield line, {ours[name]: value for name, value in row.items() if name in ours and value is not None}


def _our_columns(where: str, names: list[str], kind: str, caption_column: str | None) -> dict[str, str]:
    """Return the name in `COLUMNS` of each column that is used. Raises: DataError: a column is unknown or missing."""
    ours = {name: name for name in names if name in COLUMNS}
    if "file_name" in names:
        ours = {name: name for name in ours if name != "file"} | {"file_name": "file"}
        if "text" in names and not ours.keys() & {"caption", "captions"}:
            ours["text"] = "caption"
    if caption_column is not None and caption_column not in names:
        raise DataError(f"{where}: caption_column={caption_column} is none of the {kind} {', '.join(names)}")
    if caption_column is not None:
        ours = {name: our for name, our in ours.items() if our not in ("caption", "captions")}
        ours[caption_column] = "captions" if caption_column == "captions" else "caption"
    unknown = [name for name in names if name not in (*ours, *COLUMNS)]
    if unknown and "file_name" not in names:
        separators = "; separate columns by commas" if kind == "columns" and len(names) == 1 else ""
        raise DataError(
            f"{where}: unknown {kind} {', '.join(map(repr, unknown))}; valid: {', '.join(COLUMNS)}{separators}"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{where}: {kind} {', '.join(twice)} occur more than once")
    if "file" not in ours.values():
        raise DataError(f"{where}: {kind} must include file, got {', '.join(names) or 'none'}")
    return ours


@dataclass(frozen=True)
class Row:
    """Values of a row by column. Numbers may be texts, as in CSV.

    Args:
        where: table and line, for errors.
        values: without empty cells and null.
    """

    where: str
    values: dict[str, Any]

    def given(self, name: str) -> bool:
        """Return True if the row has a value in this column."""
        return name in self.values

    def path(self, name: str, folder: Path) -> Path | None:
        """Return a path, joined to `folder` if it is relative; None if not given."""
        if name not in self.values:
            return None
        text = self._text(name, self.values[name]).strip()
        if not text:
            raise self._error(name, "a path")
        return Path(os.path.normpath(folder / text))

    def captions(self) -> tuple[str, ...]:
        """Return the non-empty captions of `caption` (a text, or a list) or `captions`, without white space around."""
        if self.given("caption") and self.given("captions"):
            raise DataError(f"{self.where}: give caption or captions, not both")
        if self.given("captions"):
            texts = self._list("captions")
        elif isinstance(self.values.get("caption"), list):
            texts = self._list("caption")
        else:
            texts = [self._text("caption", self.values["caption"])] if self.given("caption") else []
        return tuple(text.strip() for text in texts if text.strip())

    def integer(self, name: str, *, least: int, most: int | None = None) -> int | None:
        """Return a whole number from `least` to `most`; None if not given."""
        if name not in self.values:
            return None
        expected = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        expected += "" if most is None else f" and at most {most}"
        value = self.values[name]
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                raise self._error(name, expected) from None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= (most or value):
            raise self._error(name, expected)
        return value

    def seconds(self, name: str) -> float | None:
        """Return a time in seconds; None if not given."""
        if name not in self.values:
            return None
        value = self.values[name]
        try:
            seconds = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds >= 0):
            raise self._error(name, "a time in seconds, such as 2.5")
        return seconds

    def _list(self, name: str) -> list[str]:
        value = self.values[name]
        if isinstance(value, str):  # a cell of a CSV file
            try:
                value = parse_json(value)
            except ValueError:
                value = None
        if not isinstance(value, list):
            raise self._error(name, 'a JSON list of texts, such as ["a cat", "a small cat"]')
        return [self._text(name, item) for item in value]

    def _text(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not is_unicode(value):
            raise self._error(name, "a text")
        return value

    def _error(self, name: str, expected: str) -> DataError:
        return DataError(f"{self.where}: {name}={self.values[name]!r} must be {expected}")


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
