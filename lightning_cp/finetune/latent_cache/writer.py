"""Write samples and texts to a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from lightning_cp.checkpoint.folder import flush
from lightning_cp.errors import CacheError
from lightning_cp.finetune.families import Sample
from lightning_cp.finetune.latent_cache.contents import join_rows, length_of, rows_files
from lightning_cp.finetune.latent_cache.index import read_index
from lightning_cp.finetune.latent_cache.locks import lock_file, read_owner
from lightning_cp.finetune.latent_cache.rows import (
    MediaRow,
    Row,
    RowsFile,
    TextRow,
    caption_hash,
    check_row,
    line_of,
    read_rows,
    rows_name,
    shard_name,
)
from lightning_cp.finetune.latent_cache.shards import shard_error, stored_copies, write_shard
from lightning_cp.locks import unlock

SHARD_BYTES = 256_000_000


class CacheWriter:
    """Write samples and texts of one rank to a cache. Every rank opens one, after rank 0 called `prepare_cache`.

    Tensors are collected in memory, up to `shard_bytes` for media and the same for texts. A shard is flushed to disk
    and renamed before its rows are written: a killed run loses only samples that were not yet in a shard. All ranks see
    the same `done_ids` and `done_texts`: the samples and texts stored when rank 0 prepared the cache.

    Args:
        folder: the cache.
        rank: number of the writer; its files have this number in their names.
        shard_bytes: approximate size of a shard.
    Raises: CacheError: the cache is not prepared, or another process writes with this rank.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
        if rank < 0 or shard_bytes < 1:
            raise CacheError(f"rank={rank} must be at least 0 and shard_bytes={shard_bytes} at least 1")
        self.folder = Path(folder).absolute()
        self._cache_id = read_index(self.folder).cache_id
        owner = read_owner(self.folder)
        if owner is None or not isinstance(owner.get("rows"), dict):
            raise CacheError(f"{self.folder} is not prepared: call prepare_cache on rank 0 before CacheWriter")
        ours = {kind: rows_name(kind, rank) for kind in ("media", "text")}
        files = {path.name: read_rows(path, owner["rows"].get(path.name, 0)) for path in rows_files(self.folder)}
        files |= {name: read_rows(self.folder / name) for name in ours.values() if name in files}
        stored = join_rows(files.values(), self._cache_id)
        self._media = {row.id: row for row in stored.media}
        self._texts = set(stored.texts)
        self._kinds: dict[str, _KindWriter] = {}
        try:
            for kind, name in ours.items():
                file = files.get(name, RowsFile(self.folder / name))
                self._kinds[kind] = _KindWriter(kind, rank, shard_bytes, file, self._cache_id)
        except BaseException:
            self._close_files()
            raise

    def done_ids(self) -> Mapping[str, MediaRow]:
        """Return the rows in use by id, of earlier runs and of this writer. They need not be encoded again."""
        return MappingProxyType(self._media)

    def done_texts(self) -> Set[str]:
        """Return the hashes (`caption_hash`) of the texts of earlier runs and of this writer."""
        return self._texts

    def add_media(self, row: MediaRow, tensors: Sample) -> None:
        """Add a sample; it is on disk when its shard is full, or after `flush`.

        Args:
            row: the sample; `shard` and `number` are set here.
            tensors: the media tensors, without a batch dim; copied.
        Raises: CacheError: the id is stored, or a value is not valid. OSError: the disk is full.
        """
        if row.id in self._media:
            raise CacheError(f"the sample {ascii(row.id)[:100]} is stored already: skip the ids in done_ids()")
        writer = self._kinds["media"]
        writer.add(replace(row, shard="", number=writer.waiting), tensors, f"the sample {ascii(row.id)[:100]}")
        self._media[row.id] = row

    def add_text(self, caption: str, tensors: Sample, *, media_id: str | None = None) -> str:
        """Add the text tensors of a caption. Each caption must be added by one rank only. Returns: the caption's hash.

        Args:
            tensors: [length, dim] or [dim], copied.
            media_id: id of the media sample, if the text encoder also sees the media.
        Raises: CacheError: the text is stored, or a value is not valid. OSError: the disk is full.
        """
        hash = caption_hash(caption, media_id)
        if hash in self._texts:
            raise CacheError(f"the text of {ascii(caption)[:100]} is stored already: skip the texts in done_texts()")
        row = TextRow(hash, caption, length_of(tuple(x.shape) for x in tensors.values()), media_id)
        self._kinds["text"].add(row, tensors, f"the text of {ascii(caption)[:100]}")
        self._texts.add(hash)
        return hash

    def flush(self) -> None:
        """Write everything that was added to disk. Raises: OSError: the disk is full."""
        for kind in ("text", "media"):
            self._kinds[kind].flush()

    def close(self) -> None:
        """Write everything that was added to disk and close the files. Does nothing the second time."""
        try:
            if self._kinds:
                self.flush()
        finally:
            self._close_files()

    def _close_files(self) -> None:
        while self._kinds:
            self._kinds.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and any(writer.has_failed for writer in self._kinds.values()):
            self._close_files()  # do not try the full disk again
        else:
            self.close()


class _KindWriter:
    """Write the media or the texts of one rank."""

    def __init__(self, kind: str, rank: int, shard_bytes: int, file: RowsFile, cache_id: str) -> None:
        self._path, self._shard_bytes, self._cache_id = file.path, shard_bytes, cache_id
        self._name: Callable[[int], str] = lambda number: shard_name(kind, rank, number)
        self._number = 1 + max((int(one.shard.split("-")[2].split(".")[0]) for one in file.shards), default=-1)
        self._rows: list[Row] = []
        self._samples: dict[str, Sample] = {}
        self._bytes, self._end, self.has_failed = 0, file.committed_bytes, False
        self._dtypes: dict[str, str] = {}
        is_new = not self._path.exists()
        try:
            self._descriptor = lock_file(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except BlockingIOError as error:
            raise CacheError(f"{self._path} is open in another process: give each rank its own number") from error
        try:
            if is_new:
                flush(self._path.parent)
            if os.fstat(self._descriptor).st_size != self._end:
                raise CacheError(f"{self._path} was changed after prepare_cache: end this run and start it again")
        except BaseException:
            unlock(self._descriptor)
            raise

    @property
    def waiting(self) -> int:
        """Number of samples that are not in a shard yet."""
        return len(self._rows)

    def add(self, row: Row, tensors: Sample, what: str) -> None:
        """Add a sample, and write a shard if enough bytes are waiting. Args: what: the sample, for errors."""
        check_row(row)
        copies = stored_copies(tensors, what)
        dtypes = {name: str(x.dtype) for name, x in copies.items()}
        self._dtypes = self._dtypes or dtypes
        if dtypes != self._dtypes:
            raise CacheError(f"{what} has the tensors {dtypes}, but earlier ones have {self._dtypes}")
        self._rows.append(row)
        self._samples[row.key] = copies
        self._bytes += sum(x.numel() * x.element_size() for x in copies.values())
        if self._bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write a shard with the waiting samples, then their rows."""
        if self.has_failed:
            raise CacheError(f"an earlier write to {self._path.parent} failed: run precompute again to continue")
        if not self._rows:
            return
        path = self._path.parent / self._name(self._number)
        self.has_failed = True  # also after an interrupt: the end of the rows file is then unknown
        try:
            shard = write_shard(path, self._samples, cache_id=self._cache_id)
            self._append(path, [*(line_of(replace(row, shard=path.name)) for row in self._rows), line_of(shard)])
        except OSError as error:
            raise shard_error(path, self._bytes, error) from error
        self.has_failed = False
        self._number, self._rows, self._samples, self._bytes = self._number + 1, [], {}, 0

    def close(self) -> None:
        unlock(self._descriptor)

    def _append(self, shard: Path, lines: list[bytes]) -> None:
        """Append the rows of a shard. If that fails, the rows and then the shard are removed."""
        data = b"".join(lines)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            os.fsync(self._descriptor)
        except OSError:
            with suppress(OSError):  # else the next run removes both
                os.ftruncate(self._descriptor, self._end)
                os.fsync(self._descriptor)
                shard.unlink()
            raise
        self._end += len(data)
