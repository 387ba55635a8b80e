"""Describe how a cache was made, in `index.json`; begin a cache, or continue one."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_cp.compat.versions import installed_version
from lightning_cp.errors import CacheError, StaleCacheError
from lightning_cp.files import read_json
from lightning_cp.finetune.families import Facts
from lightning_cp.finetune.latent_cache.fingerprint import check_fresh
from lightning_cp.finetune.latent_cache.rows import CONTENTS, PREVIOUS, Kind, caption_hash, checked
from lightning_cp.finetune.latent_cache.store import TEMPORARY, remove_abandoned, write_file
from lightning_cp.rules import Either, OneOf, Text, ruled

FORMAT, INDEX = 3, "index.json"
_PACKAGES = ("lightning-cp", "torch", "diffusers", "safetensors")


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {package: installed_version(package) for package in _PACKAGES}


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
        versions: versions of Python and packages that began the cache; kept when a run continues.
    """

    family: str = ruled(MISSING, Text())
    facts: Facts = ruled(MISSING, Kind(dict))
    fingerprint: Mapping[str, str] = ruled(MISSING, Kind(dict, str))
    settings: Mapping[str, Any] = ruled(MISSING, Kind(dict), default_factory=dict)
    empty_caption: str | None = ruled(caption_hash(""), Either(OneOf((None,)), Text()))
    versions: Mapping[str, str] = ruled(MISSING, Kind(dict, str), default_factory=_versions)

    @cached_property
    def identity(self) -> dict[str, str]:
        """What all samples of a cache have in common, as texts by name."""
        facts = {f"facts.{name}": json.dumps(value, sort_keys=True, default=repr) for name, value in self.facts.items()}
        return {"family": self.family, "empty_caption": self.empty_caption or "", **self.fingerprint, **facts}

    @cached_property
    def hash(self) -> str:
        """Hash of the identity, a part of all names of files."""
        return _hash(self.identity)

    def file(self, kind: str, *made_from: str) -> str:
        """Return the path in the cache of what was made from these values with the encoders of this cache."""
        name = _hash([self.hash, *made_from])
        return f"{kind}/{name[:2]}/{name}.safetensors"


def read_index(folder: Path) -> CacheIndex:
    """Read `index.json`. Raises: CacheError: the folder is no cache, or the file is damaged or of another version."""
    path = folder / INDEX
    if not path.is_file():
        raise CacheError(f"{folder} is not a latent cache: it has no {INDEX}. Make one with lightning-cp precompute")
    try:
        values = read_json(path)
        version = values.pop("format", FORMAT)
        if version == FORMAT:
            return checked(CacheIndex, values)
    except ValueError as error:
        raise CacheError(f"{path} is damaged, or not the file of a latent cache: {error}") from error
    raise CacheError(
        f"{path} has format {version!r:.20}; this one reads format {FORMAT}: install a version of lightning_cp that "
        "reads it, or make the cache again with lightning-cp precompute"
    )


def prepare_cache(folder: str | Path, index: CacheIndex) -> None:
    """Create a cache, or continue one, before any rank opens its `CacheWriter`. Call it on rank 0.

    A complete cache becomes unfinished until `CacheWriter.finish`.

    Args:
        folder: folder of the cache; it may be missing or empty.
        index: description of the cache. To continue, family, facts and fingerprint must be equal, unless the cache has
            no samples.
    Raises:
        StaleCacheError: the folder has a cache of other weights, settings or package versions.
        CacheError: it holds other files, or `index` has values that JSON does not keep. OSError: it cannot be written.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not folder.is_dir():
        raise CacheError(f"{folder} is a file: choose another output")
    names = os.listdir(folder) if folder.exists() else []
    others = sorted(name for name in names if not re.fullmatch(rf"{re.escape(TEMPORARY)}[0-9a-f]{{32}}", name))
    if INDEX in names:
        index = _continued(folder, index)
    elif others:
        raise CacheError(
            f"{folder} holds other files ({others[0][:80]}, …) and is no latent cache: use an empty folder"
        )
    values = {"format": FORMAT, **asdict(index)}
    try:
        same = json.loads(text := json.dumps(values, indent=1, allow_nan=False)) == values
    except (TypeError, ValueError):
        same = False
    if not same:
        raise CacheError(
            "facts, fingerprint and settings of a cache must consist of dicts with string keys, lists, strings, "
            f"finite numbers, bools and None: got {values}"[:1000]
        )
    remove_abandoned(folder)
    with suppress(FileNotFoundError):  # another run may do the same
        (folder / CONTENTS).rename(folder / PREVIOUS)
    write_file(folder, INDEX, text.encode())


def _continued(folder: Path, index: CacheIndex) -> CacheIndex:
    """Return the index to write: with the stored versions, unless the cache is replaced because it has no samples."""
    old = read_index(folder)
    try:
        check_fresh(folder, old.identity, index.identity)
    except StaleCacheError:
        if any(folder.glob("media/*/*.safetensors")):
            raise
        return index
    return replace(index, versions=old.versions)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
