"""Convert archives to a folder of media: tar files of webdataset, and parquet files with the bytes of pictures."""

from __future__ import annotations

import glob
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from PIL import Image

from lightning_cp.compat.versions import needs
from lightning_cp.errors import DataError
from lightning_cp.files import check_links, check_regular
from lightning_cp.finetune.media.source import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from lightning_cp.finetune.media.table import METADATA
from lightning_cp.finetune.settings import ARCHIVES

_CAPTIONS = ("caption", "captions", "text", "txt")
_ATTACHED = ("reference", "mask")
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # of bytes without a name; Pillow reads others by programs
_KEPT = ("repeats", "start_s", "end_s", "start_frame", "frames")  # other columns of a table, see docs/precompute.md


def convert_archives(archives: Sequence[str], target: Path, caption: str | None = None) -> int:
    """Write the samples of archives to a new folder, with a table. The folder appears when it is complete.

    Args: archives: paths or patterns. caption: column, or key of JSON files, with the captions; None: the usual ones.
    Returns: the number of samples.
    Raises: DataError: an archive is damaged, a sample has no picture or video, the target exists, or the disk is full.
    """
    files = [file for named in archives for file in sorted(glob.glob(named)) or [named]]
    kinds, number = {PurePath(file).suffix.lower() for file in files}, -1
    if len(kinds) != 1 or not kinds <= set(ARCHIVES):
        raise DataError(f"{', '.join(files)} must be {' or '.join(ARCHIVES)} files, all of one kind")
    if os.path.lexists(target):
        raise DataError(f"{target} exists: name a new folder")
    try:
        check_links(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            folder = Path(scratch, "media")
            folder.mkdir()
            with (folder / METADATA[0]).open("w", encoding="utf-8") as table:
                for number, row in enumerate(_rows(files, kinds.pop(), cache=f"{scratch}/cache")):
                    table.write(json.dumps(_written(folder, number, row, caption)) + "\n")
            if number < 0:
                raise DataError(f"{files[0]} has no samples")
            folder.rename(target)
    except DataError:
        raise
    except Exception as error:  # of datasets, pyarrow, tarfile, PIL or the disk
        reason = " ".join(str(error.__cause__ or error).split())
        raise DataError(f"{', '.join(files)} cannot be converted to {target}: {reason}") from error
    return number + 1


def _rows(files: Sequence[str], kind: str, *, cache: str) -> Iterator[dict[str, Any]]:
    """Yield the samples. Media are not decoded: they have the keys `bytes` and `path`."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{needs('lightning-cp convert', 'datasets')} ({error})") from error
    for file in files:
        check_regular(file)
        if kind == ".tar":
            _check_end(file)
    given: dict[str, Any] = {"data_files": [glob.escape(os.path.abspath(file)) for file in files], "cache_dir": cache}
    if kind == ".parquet":
        yield from datasets.load_dataset("parquet", split="train", streaming=True, batch_size=16, **given).decode(False)
        return
    # all that we use: datasets would infer them from the first samples, and drop what only later ones have
    features = {"__key__": datasets.Value("string"), "txt": datasets.Value("string"), "json": datasets.Json()}
    for attached in ("", *(f"{name}." for name in _ATTACHED)):
        features |= {f"{attached}{suffix[1:]}": datasets.Image(decode=False) for suffix in IMAGE_SUFFIXES}
        features |= {f"{attached}{suffix[1:]}": datasets.Video(decode=False) for suffix in VIDEO_SUFFIXES}
    given["features"] = datasets.Features(features)
    yield from datasets.load_dataset("webdataset", split="train", streaming=True, **given)


def _check_end(archive: str) -> None:
    """Raise DataError unless a tar file ends with zeros: `tarfile` stops at a damaged header as if it were the end."""
    with open(archive, "rb") as file, tarfile.open(fileobj=file, mode="r:") as opened:
        opened.getmembers()
        file.seek(opened.offset)
        if file.read(512) != bytes(512):
            raise DataError(f"{archive} is damaged at byte {opened.offset}, or was not written to its end")


def _written(folder: Path, number: int, row: dict[str, Any], caption: str | None) -> dict[str, Any]:
    """Write the media of a sample. Returns: its row of the table."""
    where = f"sample {number}" + (f" ({row['__key__']})" if "__key__" in row else "")
    facts = row.pop("json", None)
    row = {**(facts if isinstance(facts, dict) else {}), **row}
    media, entry = list[str](), dict[str, Any]()
    for column, value in row.items():
        content, suffix = _media(value)
        if suffix:
            kind = column.split(".")[0] if column.split(".")[0] in _ATTACHED else "file_name"
            media += [column] if kind == "file_name" else []
            entry[kind] = f"{number:08d}{'' if kind == 'file_name' else f'.{kind}'}{suffix}"
            (folder / entry[kind]).write_bytes(content)
    if len(media) != 1:
        got = ", ".join(media) or "none"
        raise DataError(f"{where} must have the bytes of one picture or video, got {got} of {', '.join(row)}")
    if caption is not None and caption not in row:
        raise DataError(f"{where} has no caption={caption}: its columns are {', '.join(row)}")
    text: Any = next((row[x] for x in ((caption,) if caption else _CAPTIONS) if row.get(x) is not None), [])
    texts = text if isinstance(text, list) else [text]
    if not all(isinstance(one, str) for one in texts):
        raise DataError(f"{where}: its caption {text!r} must be a text or a list of texts")
    return {**entry, **({"caption": texts} if texts else {}), **{x: row[x] for x in _KEPT if row.get(x) is not None}}


def _media(value: Any) -> tuple[bytes, str]:
    """Return the bytes of a picture or video, and its suffix, which is "" for other values."""
    content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    suffix, known = PurePath(path or "").suffix.lower(), (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
    if not isinstance(content, bytes) or suffix in known:
        return (content, suffix) if isinstance(content, bytes) else (b"", "")
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as picture:
            suffix = f".{str(picture.format).lower()}"
    except OSError:
        suffix = ".mp4" if content[4:8] == b"ftyp" else ""
    return content, suffix if suffix in known else ""
