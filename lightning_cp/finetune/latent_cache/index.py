"""Read and write `index.json`, which says what a cache is, and `complete.json`, which says that it is complete."""

from __future__ import annotations

import json
import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_cp.checkpoint.folder import flush
from lightning_cp.compat.versions import installed_version
from lightning_cp.errors import CacheError
from lightning_cp.files import read_regular, writing_new
from lightning_cp.finetune.families import Facts
from lightning_cp.finetune.latent_cache.row_checks import Checks, DamagedError, check_fields, parse
from lightning_cp.finetune.latent_cache.rows import caption_hash

FORMAT = 2
INDEX, COMPLETE = "index.json", "complete.json"
_PACKAGES = ("lightning-cp", "torch", "diffusers", "safetensors")


@dataclass(frozen=True)
class CacheIndex:
    """Description of a cache.

    Args:
        family: `name` of the model family.
        facts: the family's `facts`.
        fingerprint: result of `fingerprint_of`.
        settings: plain settings of the run that made the cache, for information.
        empty_caption: hash of the caption that replaces dropped captions; None if texts depend on the media, and
            captions cannot be dropped.
        planned_samples: number of samples that the run will store, for messages about an unfinished cache; None if
            unknown.
        cache_id: random name, also in every shard and rows file; kept when a run continues.
        versions: versions of Python and packages that began the cache; kept when a run continues.
    """

    family: str
    facts: Facts
    fingerprint: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    empty_caption: str | None = field(default_factory=lambda: caption_hash(""))
    planned_samples: int | None = None
    cache_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    versions: Mapping[str, str] = field(
        default_factory=lambda: (
            {"python": platform.python_version()} | {package: installed_version(package) for package in _PACKAGES}
        )
    )

    def write(self, folder: Path) -> None:
        """Write `index.json`. Raises: CacheError: JSON does not keep a value."""
        values = {"format": FORMAT, **asdict(self)}
        try:
            same = json.loads(json.dumps(values, allow_nan=False)) == values
        except (TypeError, ValueError):
            same = False
        if not same:
            raise CacheError(
                "facts, fingerprint and settings of a cache must consist of dicts with string keys, lists, strings, "
                f"finite numbers, bools and None: got {values}"[:1000]
            )
        write_json(folder / INDEX, values)


@dataclass(frozen=True)
class Counts:
    """Contents of a complete cache: numbers of samples, texts and shards, and the bytes of all shards."""

    samples: int
    texts: int
    shards: int
    bytes: int

    def write(self, folder: Path, cache_id: str) -> None:
        """Write `complete.json`."""
        write_json(folder / COMPLETE, {"format": FORMAT, "cache": cache_id, **asdict(self)})


def read_index(folder: Path) -> CacheIndex:
    """Read `index.json`. Raises: CacheError: the folder is no cache, or the file is damaged or of another version."""
    if not (folder / INDEX).is_file():
        raise CacheError(f"{folder} is not a latent cache: it has no {INDEX}. Make one with lightning-cp precompute")
    return CacheIndex(**_read(folder / INDEX, _INDEX_FIELDS))


def read_complete(folder: Path, cache_id: str) -> Counts | None:
    """Read `complete.json`; None if there is none. Raises: CacheError: it is damaged, or of another cache."""
    if not (folder / COMPLETE).exists():
        return None
    values = _read(folder / COMPLETE, _COMPLETE_FIELDS)
    if values.pop("cache") != cache_id:
        raise CacheError(f"{folder / COMPLETE} belongs to another cache: delete it and run precompute again")
    return Counts(**values)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file; see `replace_file`."""
    replace_file(path, json.dumps(values, indent=1, allow_nan=False).encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, flush it to disk and rename it."""
    with writing_new(path.with_name(f".tmp-{path.name}")) as scratch:
        scratch.write_bytes(data)
        flush(scratch)
        os.rename(scratch, path)
        flush(path.parent)


def _read(path: Path, checks: Checks) -> dict[str, Any]:
    try:
        values = parse(read_regular(path))
        version = values.pop("format", None)
        if type(version) is int and version != FORMAT:
            raise CacheError(
                f"{path} has format {version}; this version reads format {FORMAT}: install a version of lightning_cp "
                "that reads it, or make the cache again with lightning-cp precompute"
            )
        if type(version) is not int:
            raise DamagedError("it has no valid format number")
        check_fields(values, checks)
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror or error}") from error
    except DamagedError as error:
        raise CacheError(f"{path} is damaged, or not the file of a latent cache: {error}") from error
    return values


def _is_dict(value: Any) -> bool:
    return type(value) is dict


def _are_strings(value: Any) -> bool:
    return type(value) is dict and all(type(one) is str for one in value.values())


def _is_string(value: Any) -> bool:
    return type(value) is str and value != ""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_STRING, _NUMBER = (_is_string, "a string that is not empty"), (_is_count, "an integer of at least 0")
_INDEX_FIELDS: Checks = {
    "family": _STRING,
    "facts": (_is_dict, "a JSON object"),
    "fingerprint": (_are_strings, "a JSON object of strings"),
    "settings": (_is_dict, "a JSON object"),
    "empty_caption": (lambda value: value is None or _is_string(value), "a string that is not empty, or null"),
    "planned_samples": (lambda value: value is None or _is_count(value), "an integer or null"),
    "cache_id": _STRING,
    "versions": (_are_strings, "a JSON object of strings"),
}
_COMPLETE_FIELDS: Checks = {"cache": _STRING, **dict.fromkeys(("samples", "texts", "shards", "bytes"), _NUMBER)}
