"""Unpack archives of training media: tar files of webdataset, and parquet files with the bytes of pictures."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from types import ModuleType
from typing import Any

from lightning_cp.compat.versions import needs
from lightning_cp.errors import DataError
from lightning_cp.files import check_links, open_regular, parse_json
from lightning_cp.finetune.media.source import is_image, is_video
from lightning_cp.finetune.media.table import COLUMNS, METADATA
from lightning_cp.locks import lock, unlock

ARCHIVES = (".tar", ".parquet")
_MARK = ".unpacked.json"  # which archives a folder has, with sizes and times of change


def archives_of(path: Path) -> list[Path]:
    """Return the archives that a path or a pattern such as `shards/*.tar` names, in ascending order; none for others.

    Raises: DataError: a pattern names none, or other files.
    """
    if path.suffix.lower() not in ARCHIVES:
        return []
    if path.exists() or not glob.has_magic(path.name):
        return [path]
    found = sorted(path.parent.glob(path.name))
    if not found or any(one.suffix != path.suffix for one in found):
        raise DataError(f"{path} names no archives: expected files that end with {path.suffix}")
    return found


def unpack(path: Path, into: Path, *, caption_column: str | None = None) -> Path:
    """Unpack archives, unless this was done before and they have not changed.

    Args:
        path: an archive, or a pattern.
        into: folder for all unpacked archives; created.
        caption_column: column, or key of a JSON file, with the captions; None: `caption` or `text`.
    Returns: the folder with the files.
    Raises: DataError: an archive is damaged, has files that would be written elsewhere, or the disk is full.
    """
    archives, folder = archives_of(path), into / _name_of(path)
    try:
        mark = {"archives": [_state(one) for one in archives], "caption_column": caption_column}
        check_links(folder)
        into.mkdir(parents=True, exist_ok=True)
        descriptor, _ = lock(into)
        try:
            if not (folder / _MARK).is_file() or parse_json((folder / _MARK).read_bytes()) != mark:
                _unpack_anew(archives, folder, caption_column, mark)
        finally:
            unlock(descriptor)
    except BlockingIOError as error:
        raise DataError(f"another run unpacks archives to {into}: wait until it has ended") from error
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path} cannot be unpacked to {folder}: {error}") from error
    return folder


def _unpack_anew(archives: Sequence[Path], folder: Path, caption_column: str | None, mark: dict[str, Any]) -> None:
    scratch = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)  # of a killed run
    scratch.mkdir()
    names = {archive.stem for archive in archives}
    if len(names) < len(archives):
        raise DataError(f"two archives of {archives[0].parent} have the same name: rename one")
    for archive in archives:
        (scratch / archive.stem).mkdir()
        if archive.suffix.lower() == ".tar":
            _unpack_tar(archive, scratch / archive.stem, caption_column)
        else:
            unpack_parquet(archive, scratch, caption_column)
    (scratch / _MARK).write_text(json.dumps(mark), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(scratch, folder)


def _unpack_tar(archive: Path, folder: Path, caption_column: str | None) -> None:
    """Write the pictures, videos and captions of a tar file. A caption in `a.json` becomes `a.txt`."""
    with open_regular(archive) as file, tarfile.open(fileobj=file, mode="r:") as opened:
        for member in opened:
            name = PurePosixPath(member.name)
            content = opened.extractfile(member) if member.isreg() else None
            if content is None or any(part.startswith(".") and part not in (".", "..") for part in name.parts):
                continue  # folders, links, devices and hidden files
            if name.is_absolute() or ".." in name.parts:
                raise DataError(
                    f"{archive}: {member.name} would be written outside of the folder: names must be relative"
                )
            target = folder / name
            if target.suffix.lower() == ".json":
                text = _caption(content.read(), caption_column)
                target = target.with_suffix(".txt")
                if text and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(text, encoding="utf-8")
            elif target.suffix.lower() == ".txt" or is_image(target) or is_video(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as output:
                    shutil.copyfileobj(content, output, 1 << 20)


def _caption(content: bytes, column: str | None) -> str:
    """Return the captions of a JSON object, one per line; "" if it has none."""
    try:
        values = parse_json(content)
    except ValueError:
        return ""
    names = ("caption", "text") if column is None else (column,)
    found = next((values[name] for name in names if name in values), "") if isinstance(values, dict) else ""
    return "\n".join(" ".join(x.split()) for x in (found if isinstance(found, list) else [found]) if isinstance(x, str))


def _name_of(path: Path) -> str:
    """Return the name of the folder for a path: archives with equal names in other folders have others."""
    stem = path.stem.replace("*", "all")
    return f"{stem}-{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:8]}"


def _state(archive: Path) -> list[Any]:
    status = archive.stat()
    return [str(archive), status.st_size, status.st_mtime_ns]


_FILES = ("file", "file_name", "image", "video")  # names of the column with the media
_BATCH = 16  # rows in memory


def unpack_parquet(archive: Path, folder: Path, caption_column: str | None) -> None:
    """Write the media of a parquet file to `folder/<name of the file>`, and add their rows to `metadata.jsonl`.

    A column of media has bytes, or `bytes` and `path` as in Hugging Face's datasets, or paths relative to the archive.

    Raises: DataError: pyarrow is missing, the file is damaged, or has no column with media.
    """
    arrow = _require_pyarrow(archive)
    with open_regular(archive) as file, (folder / METADATA[0]).open("a", encoding="utf-8") as table:
        try:
            opened = arrow.parquet.ParquetFile(file)
            column = _media_column(archive, opened.schema_arrow, arrow.types)
            number = 0
            for batch in opened.iter_batches(_BATCH):
                for row in batch.to_pylist():
                    files = {"file_name": row.pop(column), **{x: row.pop(x, None) for x in ("reference", "mask")}}
                    written = {
                        name: _written(archive, folder, f"{number:08d}{'' if name == 'file_name' else '-' + name}", x)
                        for name, x in files.items()
                        if x is not None or name == "file_name"
                    }
                    kept = {name: x for name, x in row.items() if name in (*COLUMNS, "text", caption_column)}
                    table.write(json.dumps({**kept, **written}, default=str) + "\n")
                    number += 1
        except arrow.ArrowException as error:
            raise DataError(f"{archive} is damaged, or no parquet file: {error}") from error


def _require_pyarrow(archive: Path) -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{needs(f'{archive}, a parquet file,', 'pyarrow')} ({error})") from error
    found: ModuleType = pyarrow
    return found


def _media_column(archive: Path, schema: Any, types: Any) -> str:
    """Return the column with the media: one of the usual names, or the only one with bytes."""
    named = [name for name in schema.names if name in _FILES]
    holds_bytes = [name for name in schema.names if _holds_bytes(schema.field(name).type, types)]
    others = [name for name in holds_bytes if name not in ("reference", "mask")]
    media = [name for name in named if name in holds_bytes] or named or others
    if len(media) != 1:
        raise DataError(
            f"{archive} must have one column of media ({', '.join(_FILES)}, or one with bytes), got "
            f"{', '.join(media) or 'none'} of {', '.join(schema.names)}"
        )
    return str(media[0])


def _holds_bytes(kind: Any, types: Any) -> bool:
    if types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _written(archive: Path, folder: Path, name: str, value: Any) -> str:
    """Write the bytes of a value. Returns: the path of the file, relative to `folder` or absolute."""
    content, path = (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value, None)
    if isinstance(content, str) or content is None:
        path = content or path
        if not path:
            raise DataError(f"{archive}, row {int(name[:8])}: has neither the bytes nor the path of a file")
        return os.path.abspath(archive.parent / path)
    target = folder / archive.stem / f"{name}{_suffix(path, content)}"
    target.write_bytes(content)
    return target.relative_to(folder).as_posix()


def _suffix(path: str | None, content: bytes) -> str:
    """Return the suffix of a file by its path, or by its content for pictures without one."""
    suffix = PurePath(path or "").suffix.lower()
    if is_image(Path(f"x{suffix}")) or is_video(Path(f"x{suffix}")):
        return suffix
    kinds: Sequence[tuple[bytes, str]] = (
        (b"\xff\xd8", ".jpg"),
        (b"\x89PNG", ".png"),
        (b"GIF8", ".gif"),
        (b"BM", ".bmp"),
        (b"II*\0", ".tif"),
        (b"MM\0*", ".tif"),
    )
    head = io.BytesIO(content).read(16)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return ".webp"
    return next((found for start, found in kinds if head.startswith(start)), ".mp4" if head[4:8] == b"ftyp" else ".bin")
