"""Describe the files of a pipeline's encoders, to detect a cache that was made by other encoders. Loads no weights."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_cp.errors import CacheError, StaleCacheError
from lightning_cp.files import open_regular, parse_json, read_regular

SETTING = "pipeline_files"  # its name in the settings of a cache's index
_ORIGIN = {"_name_or_path", "_commit_hash", "_diffusers_version", "transformers_version"}
_BLOCKS, _BLOCK_BYTES = 32, 16  # bytes of each tensor that are read, evenly spaced
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".msgpack", ".onnx", ".md")
_LARGEST = 100 << 20  # bytes of a header or a vocabulary


def describe_files(pipeline: str | Path, components: Iterable[str]) -> dict[str, str]:
    """Return a hash of each component's files, by name; nothing for a pipeline that is no local folder.

    It covers names, shapes, dtypes and 512 bytes of every tensor in safetensors files, however they are divided into
    files, and the contents of all configs and vocabularies.

    Raises: CacheError: a file cannot be read.
    """
    folders = {name: Path(pipeline) / name for name in components}
    try:
        return {name: _describe(folder) for name, folder in folders.items() if folder.is_dir()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"a file of {pipeline} is damaged, or cannot be read: {error}") from error


def check_made_by(cache: Path, settings: Mapping[str, Any], pipeline: str | Path) -> None:
    """Compare a cache with the encoders in a pipeline's folder.

    Args:
        cache: folder of the cache, for the error.
        settings: settings of the cache's index. Caches of earlier versions do not say what made them, and pass.
        pipeline: folder, or id on the Hub, which passes.
    Raises: StaleCacheError: an encoder differs.
    """
    made_by = settings.get(SETTING)
    if not isinstance(made_by, dict):
        return
    folder = Path(pipeline)
    # The index may be forged, so its names are only looked up among the pipeline's own folders.
    folders = [path.name for path in folder.iterdir() if path.name in made_by] if folder.is_dir() else []
    here = describe_files(folder, folders)
    changed = [name for name, description in here.items() if description != made_by[name]]
    if changed:
        raise StaleCacheError(
            f"data.path={cache} was encoded with another {' and another '.join(changed)} than model.pretrained="
            f"{pipeline} has: encode the data with this pipeline (lightning-cp precompute, another output), or train "
            "the pipeline that made the cache"
        )


def _describe(folder: Path) -> str:
    digest = hashlib.sha256()
    for line in sorted(_tensors(folder.glob("*.safetensors"))):
        digest.update(line)
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.stat().st_size < _LARGEST:
            digest.update(path.name.encode() + b"\0" + _content(path))
    return digest.hexdigest()[:32]


def _content(path: Path) -> bytes:
    """Return the content of a file; for a JSON object, without the keys that say where it was loaded from."""
    if path.suffix != ".json":
        return read_regular(path)
    values = parse_json(read_regular(path))
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if key not in _ORIGIN}
    return json.dumps(values, sort_keys=True).encode()


def _tensors(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = 8 + int.from_bytes(content[:8], "little")
            if start > min(_LARGEST, len(content)):
                raise ValueError(f"{path} has no valid header")
            for name, entry in parse_json(content[8:start]).items():
                if name == "__metadata__":
                    continue
                first, last = (start + offset for offset in entry["data_offsets"])
                step = max(_BLOCK_BYTES, (last - first) // _BLOCKS)
                blocks = [content[at : min(at + _BLOCK_BYTES, last)] for at in range(first, last, step)]
                yield json.dumps([name, entry["dtype"], entry["shape"]]).encode() + b"\0" + b"".join(blocks)
