"""Read, hash and decode the media of one rank in threads, ahead of the VAE."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

from lightning_cp.errors import MediaError
from lightning_cp.files import open_regular
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.latent_cache import CacheWriter, caption_hash
from lightning_cp.finetune.media import LoadedMedia, Source, load_media
from lightning_cp.finetune.precompute.ranks import EncodingRanks
from lightning_cp.finetune.precompute.usable import Buckets, buckets_for

Loaded = tuple[LoadedMedia, dict[str, Any]] | MediaError | None
"""Pixels of a source and the fields of its row; or why it cannot be used; or None: it is stored."""
State = tuple[tuple[int, int, int], ...]  # inode, size and time of change of each file of a source


class FileHashes:
    """Hashes of the contents of files. Each file is read once, also if many clips are cut from it; thread-safe."""

    def __init__(self) -> None:
        self._locks: defaultdict[Path, Lock] = defaultdict(Lock)
        self._known: dict[Path, tuple[tuple[int, int, int], str]] = {}

    def of(self, source: Source) -> str:
        """Return the hash of a source's files, and of its own sizes if it has some.

        Raises: MediaError: a file cannot be read.
        """
        found = [self._hash(file) for file in source.files]
        if source.sizes is not None:
            found.append(str(sorted(set(source.sizes))))
        return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest()

    def _hash(self, file: Path) -> str:
        with self._locks[file]:
            state = _state(file)
            known = self._known.get(file)
            if known is None or known[0] != state:
                try:
                    with open_regular(file) as opened:
                        known = state, hashlib.file_digest(opened, "sha256").hexdigest()
                except OSError as error:
                    raise MediaError(f"{file}: cannot be read: {error.strerror or error}") from error
                self._known[file] = known
            return known[1]


def state_of(source: Source) -> State:
    """Return inode, size and time of change of a source's files. Raises: MediaError: a file no longer exists."""
    return tuple(_state(file) for file in source.files)


def _state(file: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(file)
    except OSError as error:
        raise MediaError(f"{file}: cannot be read: {error.strerror or error}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class Loader:
    """Load media with their rows.

    Args:
        buckets: sizes to choose from, see `Buckets`.
        writer: writer that takes over what is stored; None: every source is loaded.
        fps: frames per second of clips; None: the file's.
        max_upscale: largest factor of enlargement.
        family: family of the pipeline; None: a family with texts that do not depend on the media, and with
            references of the samples' size.
    """

    buckets: Buckets
    writer: CacheWriter | None = None
    fps: float | None = None
    max_upscale: float = 1.5
    family: Family | None = None
    hashes: FileHashes = field(default_factory=FileHashes)

    def load(self, source: Source) -> Loaded:
        """Load one source, unless it is stored."""
        try:
            before = state_of(source)
            row = self._row(source)
            if self.writer is not None and self.writer.take_media(row):
                return None
            media = load_media(
                source,
                buckets_for(source, self.buckets),
                fps=self.fps,
                max_upscale=self.max_upscale,
                reference_size=None if self.family is None else self.family.reference_size,
                sound_rate=None if self.family is None else self.family.sound_rate,
            )
            if state_of(source) != before:
                raise MediaError(f"{source.file}: changed while it was read")
        except MediaError as error:
            return MediaError(str(error))  # without a traceback: it is sent to the other ranks of the group
        size, crop = media.bucket, media.crop
        row |= {"frames": size.frames, "height": size.height, "width": size.width, "fps": media.fps}
        return media, {**row, "crop": (crop.top, crop.left, crop.height, crop.width)}

    def _row(self, source: Source) -> dict[str, Any]:
        """Return what a row says about a source before it is decoded. Raises: MediaError: a file cannot be read."""
        contents = self.hashes.of(source)
        seen = media_id(source, contents) if self.family is not None and self.family.text.sees_media else None
        return {
            "id": source.id,
            "source": source.origin,
            "source_hash": contents,
            "captions": tuple(caption_hash(caption, seen) for caption in source.captions),
            "repeats": source.repeats,
            "weight": source.weight,
            "use": source.use,
        }


def load_all(
    sources: Sequence[Source], loader: Loader, ranks: EncodingRanks, *, workers: int
) -> Iterator[tuple[Source, Loaded]]:
    """Yield each source as `Loader.load` returns it, on all ranks of a group; the first rank reads.

    Args: workers: threads; as many sources and one more are kept in memory.
    """
    if not ranks.writes_media:
        for source in sources:
            yield source, _result_or_raise(ranks.from_writer(None))
        return
    with ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        ahead: deque[tuple[Source, Future[Loaded]]] = deque()
        waiting = iter(sources)
        try:
            while True:
                for source in islice(waiting, workers + 1 - len(ahead)):
                    ahead.append((source, pool.submit(loader.load, source)))
                if not ahead:
                    return
                source, future = ahead.popleft()
                yield source, _result_or_raise(ranks.from_writer(_outcome_of(future, ranks)))
        finally:
            for _, future in ahead:
                future.cancel()


def media_id(source: Source, contents: str) -> str:
    """Return the name of a source's media in `caption_hash`; other contents have another name."""
    return f"{source.id} {contents}"


def _outcome_of(future: Future[Loaded], ranks: EncodingRanks) -> Loaded | _Raised:
    """Return the result, or the exception that ends the run, to be sent to the other ranks of the group."""
    try:
        ranks.check()
        return future.result()
    except Exception as error:
        return _Raised(error)


@dataclass(frozen=True)
class _Raised:
    error: Exception


def _result_or_raise(outcome: Loaded | _Raised) -> Loaded:
    if isinstance(outcome, _Raised):
        raise outcome.error
    return outcome
