"""Read a CSV or JSONL table of images and videos."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_cp.errors import DataError
from lightning_cp.files import parse_json
from lightning_cp.finetune.media.limits import REPEATS
from lightning_cp.finetune.media.row import Row
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
from lightning_cp.finetune.media.text import lines_of, read_text

TABLE_SUFFIXES = (".csv", ".jsonl")
COLUMNS = ("file", "caption", "captions", "repeats", "start_s", "end_s", "start_frame", "frames", "reference", "mask")
_RANGE = ("start_s", "end_s", "start_frame", "frames")


def read_table(table: Path) -> tuple[list[Entry], list[Skipped]]:
    """Read the rows of a table; rows with files that do not exist are skipped.

    Raises: DataError: the table cannot be read, or a row is invalid; names the table, the line and what is expected.
    """
    rows = _csv_rows(table) if table.suffix.lower() == ".csv" else _jsonl_rows(table)
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    for line, values in rows:
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


def _csv_rows(table: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of the first line of each row, and its non-empty cells by column."""
    reader = csv.reader(io.StringIO(read_text(table), newline=""), strict=True)
    header: list[str] | None = None
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
        if header is None:
            header = [cell.strip() for cell in cells]
            _check_columns(f"{table}, line {line}", header, "columns")
            continue
        if len(cells) != len(header):
            raise DataError(
                f"{table}, line {line}: expected {len(header)} cells ({', '.join(header)}), got {len(cells)}; "
                "quote cells that hold commas"
            )
        yield line, {name: cell for name, cell in zip(header, cells, strict=True) if cell.strip()}
    if header is None:
        raise DataError(f"{table} is empty: expected a header with the columns {', '.join(COLUMNS[:2])}, and rows")


def _jsonl_rows(table: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each non-empty line, without null values."""
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
        _check_columns(where, list(row), "keys")
        yield line, {name: value for name, value in row.items() if value is not None}


def _check_columns(where: str, names: list[str], kind: str) -> None:
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        separators = "; separate columns by commas" if kind == "columns" and len(names) == 1 else ""
        raise DataError(
            f"{where}: unknown {kind} {', '.join(map(repr, unknown))}; valid: {', '.join(COLUMNS)}{separators}"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{where}: {kind} {', '.join(twice)} occur more than once")
    if "file" not in names:
        raise DataError(f"{where}: {kind} must include file, got {', '.join(names) or 'none'}")
