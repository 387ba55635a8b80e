"""Prepare a cache's folder for the writers of a run, and declare the cache complete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from lightning_cp.checkpoint.folder import flush
from lightning_cp.errors import CacheError, StaleCacheError
from lightning_cp.finetune.latent_cache.contents import Contents, check_contents, join_rows, read_contents, rows_files
from lightning_cp.finetune.latent_cache.fingerprint import check_fresh
from lightning_cp.finetune.latent_cache.index import COMPLETE, INDEX, CacheIndex, Counts, read_index, replace_file
from lightning_cp.finetune.latent_cache.locks import OWNER, FolderLock, lock_file
from lightning_cp.finetune.latent_cache.row_checks import SHARD_NAME
from lightning_cp.finetune.latent_cache.rows import MediaRow, RowsFile, line_of, read_rows
from lightning_cp.finetune.latent_cache.shards import TEMPORARY, check_size
from lightning_cp.locks import unlock


class PreparedCache:
    """A cache's folder, locked for one run. Use it as a context, or call `release`.

    Args:
        folder: the folder.
        index: description of the cache.
        contents: rows that earlier runs stored.
    """

    def __init__(self, folder: Path, index: CacheIndex, contents: Contents, lock: FolderLock) -> None:
        self.folder, self.index, self.contents, self._lock = folder, index, contents, lock

    def replace_rows(self, rows: Iterable[MediaRow]) -> None:
        """Replace the rows of stored samples; their tensors stay. Call it before any rank opens its writer.

        Args: rows: each takes the place of the row with the same shard and number.
        """
        by_tensors = {(row.shard, row.key): row for row in rows}
        if not by_tensors:
            return
        files = [read_rows(path) for path in rows_files(self.folder)]
        for file in files:
            if any((row.shard, row.key) in by_tensors for row in file.rows):
                _rewrite(file, by_tensors)
        files = [read_rows(path) for path in rows_files(self.folder)]
        self.contents = join_rows(files, self.index.cache_id)
        self._lock.write_owner({"rows": {file.path.name: file.committed_bytes for file in files}})

    def finish(self) -> Counts:
        """Check all rows and shards, and declare the cache complete. Call it after all ranks closed their writers.

        Raises: CacheError: a caption of a sample has no text, or an id was written twice.
        """
        contents = read_contents(self.folder, self.index.cache_id)
        check_contents(self.folder, contents, self.index)
        contents.counts.write(self.folder, self.index.cache_id)
        return contents.counts

    def release(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def prepare_cache(folder: str | Path, index: CacheIndex) -> PreparedCache:
    """Create a cache, or continue one, and lock it. Call it on rank 0 before any rank opens its `CacheWriter`.

    Unfinished files of killed runs are removed. A complete cache becomes unfinished until `PreparedCache.finish`.

    Args:
        folder: folder of the cache; it may be missing or empty.
        index: description of the cache. To continue, family, facts and fingerprint must be equal.
    Returns: the locked cache. Wait for it (a barrier) on the other ranks.
    Raises:
        StaleCacheError: the folder has a cache of other weights, settings or package versions.
        CacheError: another run is writing the folder, it holds other files, or the cache is damaged.
    """
    folder = Path(folder).absolute()
    _check_is_cache(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        _check_is_cache(folder)
        if (folder / INDEX).exists():
            index = _continued(folder, index)
        (folder / COMPLETE).unlink(missing_ok=True)
        index.write(folder)
        files = [_recovered(path) for path in rows_files(folder)]
        contents = join_rows(files, index.cache_id)
        _remove_leftovers(folder, contents)
        for shard in contents.shards.values():
            check_size(folder / shard.shard, shard)
        flush(folder)
        lock.write_owner({"rows": {file.path.name: file.committed_bytes for file in files}})
    except BaseException:
        lock.release()
        raise
    return PreparedCache(folder, index, contents, lock)


def _check_is_cache(folder: Path) -> None:
    """Raise CacheError if the folder has files, but is no cache: nothing may be removed from it."""
    if folder.exists() and not folder.is_dir():
        raise CacheError(f"{folder} is a file: choose another output")
    if not folder.exists() or (folder / INDEX).exists():
        return
    others = sorted(name for name in os.listdir(folder) if name not in (OWNER, f"{TEMPORARY}-{INDEX}"))
    if others:
        raise CacheError(
            f"{folder} holds other files ({others[0][:80]}, …) and is no latent cache: use an empty folder"
        )


def _continued(folder: Path, new: CacheIndex) -> CacheIndex:
    """Return the new index with the identity of the stored one.

    A cache without any sample, of a run that could use no file, is replaced by an empty one.

    Raises: StaleCacheError: they differ.
    """
    old = read_index(folder)
    try:
        check_fresh(folder, _identity(old), _identity(new))
    except StaleCacheError:
        files = [read_rows(path) for path in rows_files(folder)]
        if any(isinstance(row, MediaRow) for file in files for row in file.rows):
            raise
        for file in files:  # their shards go with the other leftovers
            file.path.unlink()
        return new
    return replace(new, cache_id=old.cache_id, versions=old.versions)


def _identity(index: CacheIndex) -> dict[str, str]:
    facts = {f"facts.{name}": json.dumps(value, sort_keys=True, default=repr) for name, value in index.facts.items()}
    return {"family": index.family, "empty_caption": index.empty_caption or "", **index.fingerprint, **facts}


def _recovered(path: Path) -> RowsFile:
    """Remove the rows of an interrupted write from the end of a rows file."""
    try:
        descriptor = lock_file(path, os.O_RDWR)
    except BlockingIOError as error:
        raise CacheError(f"{path} is still open in a process of an earlier run: wait until it has ended") from error
    try:
        file = read_rows(path)
        if file.committed_bytes != file.total_bytes:
            os.ftruncate(descriptor, file.committed_bytes)
            os.fsync(descriptor)
    finally:
        unlock(descriptor)
    return file


def _rewrite(file: RowsFile, rows: Mapping[tuple[str, str], MediaRow]) -> None:
    """Write a rows file with other rows, by shard and key, for some samples; see `replace_file`."""
    lines = list[bytes]()
    for shard in file.shards:
        stored = [row for row in file.rows if row.shard == shard.shard]
        lines += [line_of(rows.get((row.shard, row.key), row)) for row in stored]
        lines.append(line_of(shard))
    replace_file(file.path, b"".join(lines))


def _remove_leftovers(folder: Path, contents: Contents) -> None:
    """Remove temporary files, and shards without rows. Files with other names stay."""
    for path in list(folder.iterdir()):
        unlisted = SHARD_NAME.fullmatch(path.name) is not None and path.name not in contents.shards
        if path.is_file() and (unlisted or path.name.startswith(TEMPORARY)):
            path.unlink()
