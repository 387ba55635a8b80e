"""Read and write the rows files of a cache: JSON lines that list samples, texts and shards.

The rows of one shard come first, then one line for the shard itself with its size, its checksum and its number of rows.
Rows without this line are those of an interrupted write, and do not count.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightning_cp.errors import CacheError
from lightning_cp.files import read_regular
from lightning_cp.finetune.latent_cache import row_checks


@dataclass(frozen=True, slots=True)
class MediaRow:
    """One picture or clip of a cache.

    Args:
        id: unique name in the cache; a run that continues skips the ids that are stored.
        source: path of the file, relative to the data folder.
        source_hash: hash of the file's contents, to notice a changed file.
        frames: number of pixel frames; 1 for pictures.
        height: pixels.
        width: pixels.
        tokens: number of tokens of the transformer.
        captions: hashes of one or more captions, see `caption_hash`.
        fps: frames per second; None for pictures.
        crop: (top, left, height, width) of the crop, in pixels of the resized source; None without a crop.
        repeats: number of times that an epoch shows the sample; 0: it is no longer in the data, and not used.
        weight: weight of the sample in the loss.
        use: `train`; `prior`: trained on, and never held out; `validation`: not trained on.
        shard: file that holds the tensors; set by the writer.
        number: number of the sample in its shard; set by the writer.
    """

    id: str
    source: str
    source_hash: str
    frames: int
    height: int
    width: int
    tokens: int
    captions: tuple[str, ...]
    fps: float | None = None
    crop: tuple[int, int, int, int] | None = None
    repeats: int = 1
    weight: float = 1.0
    use: str = "train"
    shard: str = ""
    number: int = 0

    @property
    def key(self) -> str:
        """Prefix of the tensors' names in the shard."""
        return str(self.number)


@dataclass(frozen=True, slots=True)
class TextRow:
    """One distinct caption of a cache.

    Args:
        hash: see `caption_hash`.
        caption: the text.
        length: number of stored positions.
        media_id: id of the sample that the text was encoded with, if the text encoder sees the media.
        shard: file that holds the tensors.
    """

    hash: str
    caption: str
    length: int
    media_id: str | None = None
    shard: str = ""

    @property
    def key(self) -> str:
        """Prefix of the tensors' names in the shard."""
        return self.hash


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One shard; its rows precede it in the file. Args: cache: the id of the cache."""

    shard: str
    size_bytes: int
    crc32: int
    rows: int
    cache: str


Row = MediaRow | TextRow


@dataclass
class RowsFile:
    """Contents of a rows file. Bytes after `committed_bytes` are those of an interrupted write."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    shards: list[ShardRow] = field(default_factory=list)
    committed_bytes: int = 0
    total_bytes: int = 0


def caption_hash(caption: str, media_id: str | None = None) -> str:
    """Return the name of a caption's text in the cache: 32 hexadecimal digits.

    Args: media_id: id of the media sample, if the text encoder also sees the media.
    """
    text = caption if media_id is None else json.dumps([caption, media_id])
    kind = b"caption:" if media_id is None else b"caption and media:"
    return hashlib.sha256(kind + text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def rows_name(kind: str, rank: int) -> str:
    """Return the name of a writer's rows file. Args: kind: `media` or `text`."""
    return f"rows-{rank:05d}-{kind}.jsonl"


def shard_name(kind: str, rank: int, number: int) -> str:
    """Return the name of a shard. Args: kind: `media` or `text`."""
    return f"{kind}-{rank:05d}-{number:06d}.safetensors"


def line_of(row: Row | ShardRow) -> bytes:
    """Return a row as one line of JSON."""
    return json.dumps(asdict(row)).encode("ascii") + b"\n"


def read_rows(path: Path, limit_bytes: int | None = None) -> RowsFile:
    """Read a rows file up to the last shard's line. Below it may be rows and half a line of an interrupted write.

    Args: limit_bytes: read only the beginning; None: all.
    Raises: CacheError: a complete line is damaged.
    """
    kind: type[Row] = MediaRow if path.name.endswith("-media.jsonl") else TextRow
    try:
        data = read_regular(path)[:limit_bytes]
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror or error}") from error
    rows_file, pending, offset = RowsFile(path, total_bytes=len(data)), list[Row](), 0
    for number, line in enumerate(data.split(b"\n")[:-1], 1):  # the last one is empty, or half a line
        offset += len(line) + 1
        try:
            row = _parsed(line, kind)
            if not isinstance(row, ShardRow):
                pending.append(row)
            if any(one.shard != row.shard for one in pending[:1]):
                raise row_checks.DamagedError(f"it belongs to {row.shard}, the line before to {pending[0].shard}")
            if isinstance(row, ShardRow) and len(pending) != row.rows:
                raise row_checks.DamagedError(f"{row.shard} has {len(pending)} rows, but {row.rows} were written")
        except row_checks.DamagedError as error:
            raise CacheError(
                f"{path} is damaged in line {number}: {error}. Restore the file, or delete this line and all lines "
                "below it and run precompute again: it then encodes these samples again"
            ) from error
        if isinstance(row, ShardRow):
            rows_file.rows += pending
            rows_file.shards.append(row)
            rows_file.committed_bytes, pending = offset, []
    return rows_file


def check_row(row: Row) -> None:
    """Raise CacheError if a field of a new row is not valid."""
    name = row.id if isinstance(row, MediaRow) else row.hash
    try:
        plain = json.loads(line_of(row))
        row_checks.check_fields(plain, row_checks.MEDIA_FIELDS if isinstance(row, MediaRow) else row_checks.TEXT_FIELDS)
    except (row_checks.DamagedError, TypeError) as error:  # TypeError: a value that JSON does not have
        raise CacheError(f"the row of {ascii(name)[:100]} cannot be stored: {error}") from error


def _parsed(line: bytes, kind: type[Row]) -> Row | ShardRow:
    values = row_checks.parse(line)
    if "crc32" in values:
        row_checks.check_fields(values, row_checks.SHARD_FIELDS)
        return ShardRow(**values)
    if kind is TextRow:
        row_checks.check_fields(values, row_checks.TEXT_FIELDS)
        return TextRow(**values)
    row_checks.check_fields(values, row_checks.MEDIA_FIELDS)
    values["captions"] = tuple(values["captions"])
    values["crop"] = None if values["crop"] is None else tuple(values["crop"])
    return MediaRow(**values)
