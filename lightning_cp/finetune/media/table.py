"""Read a CSV or JSONL table of images and videos, and text files."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

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
from lightning_cp.rules import Each, Either, Integer, Number, Rule


class _Unicode(Rule):
    @override
    def passes(self, value: Any) -> bool:
        return isinstance(value, str) and is_unicode(value)

    @override
    def describe(self) -> str:
        return "a text"


class _Path(_Unicode):
    @override
    def passes(self, value: Any) -> bool:
        return super().passes(value) and bool(value.strip())

    @override
    def describe(self) -> str:
        return "a path"


_SECONDS = Number(minimum=0, maximum=1e9)
_RULES: dict[str, Rule] = {
    "file": _Path(),
    "caption": Either(_Unicode(), Each(_Unicode())),
    "captions": Each(_Unicode()),
    "repeats": Integer(1, REPEATS),
    "start_s": _SECONDS,
    "end_s": _SECONDS,
    "start_frame": Integer(0),
    "frames": Integer(1),
    "reference": _Path(),
    "mask": _Path(),
}
COLUMNS = tuple(_RULES)
_PATHS = ("file", "reference", "mask")
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
        entry = entry_of(table.parent, f"{table}, line {line}", values)
        missing = [file for file in entry.source.files if not os.path.isfile(file)]
        if missing:
            state = "is no file" if os.path.exists(missing[0]) else "does not exist"
            skipped.append(Skipped(missing[0], f"{state} ({entry.where})"))
        else:
            entries.append(entry)
    return entries, skipped


def entry_of(folder: Path, where: str, values: Mapping[str, Any]) -> Entry:
    """Return the entry of a row. Raises: DataError: a value is not valid; names `where`."""
    if isinstance(values.get("reference"), list):
        raise DataError(f"{where}: reference={values['reference']!r} is a list: {ONE_REFERENCE}")
    row = {name: _checked(where, name, value) for name, value in values.items()}
    paths = {name: Path(os.path.normpath(folder / row[name].strip())) for name in _PATHS if name in row}
    file, reference, mask = map(paths.get, _PATHS)
    if file is None:
        raise DataError(f"{where}: file is missing: expected a path relative to {folder}")
    if not (is_image(file) or is_video(file)):
        raise DataError(f"{where}: file={file.name} has an unknown suffix; usable are {accepted_suffixes()}")
    given = [name for name in _RANGE if name in row]
    if given and is_image(file):
        raise DataError(f"{where}: {', '.join(given)} can only be given for videos, but {file.name} is an image")
    if reference and not (is_image(reference) or is_video(reference)):
        raise DataError(f"{where}: reference={reference.name} must be an image or a video")
    if mask and not is_image(mask):
        raise DataError(f"{where}: mask={mask.name} must be an image")
    if "caption" in row and "captions" in row:
        raise DataError(f"{where}: give caption or captions, not both")
    start_s, end_s, frame_range = _range(where, row)
    name = Path(os.path.relpath(file, folder)).as_posix()
    source = Source(
        id=clip_id(name, start_s, end_s) if frame_range is None else f"{name}#frame{frame_range[0]}+{frame_range[1]}",
        file=file,
        captions=captions_of(row.get("captions", row.get("caption", ()))),
        repeats=row.get("repeats", 1),
        start_s=start_s,
        end_s=end_s,
        reference=reference,
        mask=mask,
    )
    return Entry(source, name, where, frame_range)


def _checked(where: str, name: str, value: Any) -> Any:
    """Return a valid value of a column; cells of a CSV file are texts, also for numbers and lists."""
    rule, found = _RULES[name], value
    if isinstance(value, str) and not rule.passes(value):
        for convert in (parse_json, float, int):  # the last one that succeeds
            with suppress(ValueError):
                found = convert(value)
    if not rule.passes(found):
        raise DataError(f"{where}: {name}={value!r} must be {rule.describe()}")
    return found


def captions_of(texts: str | Sequence[str]) -> tuple[str, ...]:
    """Return the texts that are not blank, without blanks at their ends."""
    return tuple(text.strip() for text in ([texts] if isinstance(texts, str) else texts) if text.strip())


def _range(where: str, row: Mapping[str, Any]) -> tuple[float, float | None, tuple[int, int] | None]:
    """Return start_s, end_s, and the range in frames if it is given in frames."""
    start_frame, frames, start_s, end_s = map(row.get, ("start_frame", "frames", "start_s", "end_s"))
    if start_frame is None and frames is None:
        start_s = float(start_s or 0)
        if end_s is not None and end_s <= start_s:
            raise DataError(f"{where}: end_s={end_s:g} must be greater than start_s={start_s:g}")
        return start_s, end_s if end_s is None else float(end_s), None
    if start_s is not None or end_s is not None:
        raise DataError(f"{where}: give a clip as start_s and end_s, or as start_frame and frames, not both")
    if frames is None:
        raise DataError(f"{where}: start_frame needs frames, the number of frames of the clip")
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
