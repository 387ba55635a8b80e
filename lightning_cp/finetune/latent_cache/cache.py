"""Read a complete cache."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_cp.checkpoint.manifest import FileEntry
from lightning_cp.errors import CacheError
from lightning_cp.finetune.families import Family, Sample, load_family
from lightning_cp.finetune.latent_cache.contents import check_contents, read_contents, rows_files
from lightning_cp.finetune.latent_cache.index import read_complete, read_index
from lightning_cp.finetune.latent_cache.locks import owner_text
from lightning_cp.finetune.latent_cache.rows import MediaRow, Row, ShardRow, TextRow, read_rows
from lightning_cp.finetune.latent_cache.shards import again, check_size, open_shard

_MOST_OPEN = 128  # shards that a process keeps mapped


class LatentCache:
    """Random access to the samples of a complete cache, through memory maps.

    Opening reads all rows and the headers of all shards, no tensors. Samples are ordered by id. The cache can be used
    in DataLoader workers, forked or spawned: each process opens its own maps. Returned tensors are copies.

    Args: folder: the cache.
    Raises: CacheError: it is missing, unfinished or damaged; the message names the file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.index = read_index(self.folder)
        counts = read_complete(self.folder, self.index.cache_id)
        if counts is None:
            raise CacheError(_unfinished(self.folder, self.index.planned_samples))
        self._contents = read_contents(self.folder, self.index.cache_id)
        if self._contents.counts != counts:
            raise CacheError(
                f"{self.folder} was changed after it was complete: its rows files list {self._contents.counts}, "
                f"complete.json {counts}. Run precompute again to repair it"
            )
        self._names = check_contents(self.folder, self._contents, self.index)
        self._maps = _Maps()

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._contents.media)

    @property
    def rows(self) -> Sequence[MediaRow]:
        """Rows of the samples, ordered by id."""
        return self._contents.media

    @property
    def fingerprint(self) -> dict[str, str]:
        """Fingerprint of what made the cache, see `fingerprint_of`."""
        return dict(self.index.fingerprint)

    def sample(self, i: int, caption: int = 0) -> Sample:
        """Return the tensors of a sample, media and text. Args: caption: which of the row's captions.

        Raises: IndexError: there is no such sample or caption. CacheError: the shard was changed since it was opened.
        """
        row = self._contents.media[i]
        return {**self._tensors(row), **self.text(row.captions[caption])}

    def text(self, hash: str) -> Sample:
        """Return the text tensors of a caption. Raises: CacheError: there is no such text."""
        if hash not in self._contents.texts:
            raise CacheError(f"{self.folder} has no text {ascii(hash)[:80]}")
        return self._tensors(self._contents.texts[hash])

    def caption(self, hash: str) -> str:
        """Return the caption with a hash. Raises: CacheError: there is no such text."""
        if hash not in self._contents.texts:
            raise CacheError(f"{self.folder} has no text {ascii(hash)[:80]}")
        return self._contents.texts[hash].caption

    @property
    def empty_text(self) -> Sample | None:
        """Text tensors of the empty caption; None if the text encoder saw the media: no text then fits all samples."""
        return None if self.index.empty_caption is None else self.text(self.index.empty_caption)

    def family(self) -> Family:
        """Return the model family, bound to the stored facts. Raises: FamilyError: it is not registered."""
        return load_family(self.index.family, self.index.facts)

    def verify(self) -> None:
        """Read all shards and compare their checksums. Raises: CacheError: a shard was changed."""
        for name, shard in sorted(self._contents.shards.items()):
            path = self.folder / name
            check_size(path, shard)
            crc32 = FileEntry.of(path).crc32
            if crc32 != shard.crc32:
                raise CacheError(
                    f"{path} is damaged: its CRC-32 is {crc32}, but {shard.crc32} was written. {again(path)}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": _Maps()}

    def _tensors(self, row: Row) -> Sample:
        path, shard = self.folder / row.shard, self._contents.shards[row.shard]
        check_size(path, shard)
        opened = self._maps.open(path, shard)
        try:
            # a copy: the map's own tensors share memory between all reads
            return {name: torch.clone(opened.get_tensor(f"{row.key}/{name}")) for name in self._names[type(row)]}
        except Exception as error:
            raise CacheError(f"{path} is damaged: {error}. {again(path)}") from error


class _Maps:
    """The shards that this process has mapped, the least recently used first."""

    def __init__(self) -> None:
        self._process, self._opened = os.getpid(), OrderedDict[str, Any]()

    def open(self, path: Path, shard: ShardRow) -> Any:
        """Return the `safe_open` object of a shard. Raises: CacheError: it was changed."""
        if self._process != os.getpid():  # a forked DataLoader worker
            self._process, self._opened = os.getpid(), OrderedDict()
        if path.name not in self._opened:
            self._opened[path.name] = open_shard(path, shard)
        self._opened.move_to_end(path.name)
        if len(self._opened) > _MOST_OPEN:
            self._opened.popitem(last=False)
        return self._opened[path.name]


def _unfinished(folder: Path, planned: int | None) -> str:
    """Describe how far an unfinished cache got, and what to do."""
    rows = [row for path in rows_files(folder) for row in read_rows(path).rows]
    texts = sum(isinstance(row, TextRow) for row in rows)
    samples = sum(isinstance(row, MediaRow) and row.repeats > 0 for row in rows)
    of = "" if planned is None else f" of {planned}"
    owner = owner_text(folder)
    writing = f"; {owner} writes it, or was killed" if owner else ""
    return (
        f"{folder} is not complete: it has {samples}{of} samples and {texts} texts{writing}. Run precompute "
        "again to continue"
    )
