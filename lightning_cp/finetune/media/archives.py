"""Convert archives to a folder of media: tar files of webdataset, and parquet files with the bytes of media."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_cp.compat.versions import needs
from lightning_cp.errors import DataError
from lightning_cp.files import check_links, check_regular, open_regular, parse_json
from lightning_cp.finetune.media.limits import CAPTION_BYTES
from lightning_cp.finetune.media.source import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from lightning_cp.finetune.media.table import METADATA, captions_of, entry_of, lines_of
from lightning_cp.finetune.settings import ARCHIVES

_CAPTIONS = ("txt", "caption", "captions", "text")
_ATTACHED = ("reference", "mask")
_KEPT = ("caption", "repeats", "start_s", "end_s", "start_frame", "frames")  # columns, see docs/precompute.md
_SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
_MEDIA = rf"((?P<kind>[^/]*)\.)?({'|'.join(x[1:] for x in _SUFFIXES)})"
_USED = re.compile(rf"(?P<sample>(.*/)?[^./]+)\.((?P<text>txt|json)|{_MEDIA})", re.IGNORECASE | re.DOTALL)
_BRANDS = (b"ftyp3gp", b"ftypM4V", b"ftypMSNV", b"ftypavc1", b"ftypdash", b"ftypiso", b"ftypmp4", b"ftypqt")
_STARTS = (  # of media without a name: where, what, suffix; pictures in HEIC have other brands
    *((0, b"\xff\xd8\xff", ".jpg"), (0, b"\x89PNG", ".png"), (0, b"GIF8", ".gif"), (0, b"BM", ".bmp")),
    *((0, (b"II*\0", b"MM\0*"), ".tif"), (8, b"WEBP", ".webp"), (4, b"ftypavi", ".avif"), (4, _BRANDS, ".mp4")),
)
_Rows = Iterator[tuple[str, dict[str, Any]]]  # names of samples, and columns: media are pairs (open file, suffix)


def convert_archives(archives: Sequence[str], target: Path, caption: str | None = None) -> int:
    """Write the samples of archives to a new folder, with a table. The folder appears when it is complete.

    Args: archives: paths or patterns. caption: column, or key of JSON files, with the captions; None: the usual ones.
    Returns: the number of samples.
    Raises: DataError: an archive is damaged, a sample cannot be used, the target exists, or the disk is full.
    """
    files, names = list[str](), Counter[str]()
    for named in archives:
        found = [named] if os.path.lexists(named) else sorted(glob.glob(named))
        for file in found or ["no file"]:
            if not file.lower().endswith(ARCHIVES):
                raise DataError(f"{named} names {file}: expected {' or '.join(ARCHIVES)} files")
        files += found
    if os.path.lexists(target):
        raise DataError(f"{target} exists: name a new folder")
    try:
        check_links(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            folder = Path(scratch, "media")
            folder.mkdir()
            with (folder / METADATA[0]).open("w", encoding="utf-8") as table:
                for file in files:
                    for where, row in (_tar if file.lower().endswith(".tar") else _parquet)(file):
                        written = _written(folder, f"{file}, {where}", row, caption=caption, names=names)
                        table.write(json.dumps(written) + "\n")
            if not names:
                raise DataError(f"{file} has no samples")
            folder.rename(target)
    except DataError:
        raise
    except Exception as error:  # of datasets, pyarrow, tarfile or the disk
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise DataError(f"{file} cannot be converted to {target}: {reason}") from error
    return names.total()


def _written(folder: Path, where: str, row: dict[str, Any], *, caption: str | None, names: Counter[str]) -> Any:
    """Write the media of a sample, and return its row of the table. Args: names: how many samples have each name."""
    media = {x: value for x, value in row.items() if isinstance(value, tuple)}
    named: list[str] = [x for x in ("image", "video") if x in row] or [x for x in media if x not in _ATTACHED]
    files, attached = [x for x in named if x in media], [x for x in _ATTACHED if row.get(x) is not None]
    if len(files) != 1 or not media.keys() >= {*attached}:
        got = ", ".join(media)[:100] or "none"
        raise DataError(f"{where} must have the bytes of 1 picture or video, and of any reference and mask, got {got}")
    if caption is not None and caption not in row:
        raise DataError(f"{where} has no caption={caption}: its columns are {', '.join(row)[:100]}")
    text = next((row[x] for x in ((caption,) if caption else _CAPTIONS) if row.get(x) not in (None, "", [])), None)
    values = {x: value for x, value in {**row, "caption": text}.items() if x in _KEPT and value is not None}
    for column in (*files, *attached):
        content, suffix = media[column]
        name = hashlib.file_digest(content, "sha256").hexdigest()[:24]  # a cache keeps it if other samples come or go
        if column in files:
            names[name] += 1
            name += f"-{names[name]}" if names[name] > 1 else ""
        values["file" if column in files else column] = name + suffix
        content.seek(0)
        with (folder / f"{name}{suffix}").open("wb") as file:
            shutil.copyfileobj(content, file)
    entry_of(folder, where, values)
    return {"file_name": values.pop("file"), **values}


def _tar(archive: str) -> _Rows:
    """Group files by their name up to the first dot. Those that are not used are not read."""
    with open_regular(archive) as file, tarfile.open(fileobj=file, mode="r:") as opened:
        samples = dict[str, dict[str, tarfile.TarInfo]]()
        for member in opened:
            used = _USED.fullmatch(member.name)
            if used is None or member.isdir():
                continue
            kind, sample = (used["text"] or used["kind"] or "image").lower(), samples.setdefault(used["sample"], {})
            known = member.size <= CAPTION_BYTES if used["text"] else kind in _ATTACHED or not used["kind"]
            if kind in sample or not known or not member.isreg() or member.issparse():
                raise DataError(
                    f"{archive}: {member.name!r} must be the only NAME.SUFFIX, NAME.reference.SUFFIX or "
                    f"NAME.mask.SUFFIX of its sample; no link, not sparse, and a text of at most {CAPTION_BYTES} bytes"
                )
            sample[kind] = member
        file.seek(end := opened.offset)  # tarfile stops at a damaged header as if it were the end
        if file.read(512) != bytes(512) or any(rest.strip(b"\0") for rest in iter(lambda: file.read(1 << 20), b"")):
            raise DataError(f"{archive} is damaged at byte {end}, was not written to its end, or has more after it")
        for name, sample in samples.items():
            row: dict[str, Any] = {x: (opened.extractfile(y), Path(y.name).suffix.lower()) for x, y in sample.items()}
            try:
                facts = parse_json(row.pop("json")[0].read()) if "json" in row else None
                if "txt" in row:
                    row["txt"] = [*captions_of(lines_of(row["txt"][0].read().decode("utf-8-sig")))]
            except ValueError as error:
                raise DataError(f"{archive}, sample {name!r}: its text or JSON is not valid ({error})") from error
            yield f"sample {name!r}", {**(facts if isinstance(facts, dict) else {}), **row}


def _parquet(archive: str) -> _Rows:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{needs('lightning-cp convert', 'datasets')} ({error})") from error
    check_regular(archive)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it prints the errors that it raises
    with tempfile.TemporaryDirectory() as scratch:
        link = Path(scratch, "a.parquet")  # datasets would take a path with `*` for a pattern, one with `::` for a URL
        link.symlink_to(os.path.abspath(archive))
        given = {"data_files": str(link), "cache_dir": scratch, "split": "train", "streaming": True, "batch_size": 16}
        for number, row in enumerate(datasets.load_dataset("parquet", **given).decode(False)):
            yield f"row {number}", {column: _media(value) for column, value in row.items()}


def _media(value: Any) -> Any:
    """Return the bytes of a picture or video as an open file and its suffix; other values as they are."""
    content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    if not isinstance(content, bytes):
        return value if value != {"bytes": None, "path": None} else None
    suffixes = [Path(path or "").suffix.lower(), *(x for at, start, x in _STARTS if content.startswith(start, at))]
    return next(((io.BytesIO(content), suffix) for suffix in suffixes if suffix in _SUFFIXES), value)
