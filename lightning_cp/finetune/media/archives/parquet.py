"""Read parquet files with the bytes of pictures, as Hugging Face's datasets have them. It needs pyarrow."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from lightning_cp.compat.versions import needs
from lightning_cp.errors import DataError
from lightning_cp.files import open_regular
from lightning_cp.finetune.media.source import is_image, is_video
from lightning_cp.finetune.media.table import COLUMNS, METADATA

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
