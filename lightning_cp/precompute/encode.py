"""Encode captions and media of one rank, and write them to the cache."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_cp.errors import CacheError, MediaError
from lightning_cp.families import Family
from lightning_cp.latent_cache import CacheWriter, MediaRow, caption_hash
from lightning_cp.media import Bucket, LoadedMedia, Skipped, Source, load_media
from lightning_cp.precompute.ranks import EncodingRanks

Report = Callable[[int], object]  # called with the number of items that are done


def encode_captions(
    pipe: Any,
    family: Family,
    captions: Sequence[str],
    writer: CacheWriter,
    *,
    batch_size: int = 8,
    report: Report = lambda _: None,
) -> int:
    """Encode captions that the cache does not have. Returns: their number.

    Args: captions: distinct; of this rank.
    """
    done = writer.done_texts()
    new = [caption for caption in captions if caption_hash(caption) not in done]
    report(len(captions) - len(new))
    for start in range(0, len(new), batch_size):
        batch = new[start : start + batch_size]
        for caption, sample in zip(batch, family.encode_text(pipe, batch), strict=True):
            writer.add_text(caption, {name: x.cpu() for name, x in sample.items()})
        report(len(batch))
    writer.flush()
    return len(new)


def encode_sources(
    pipe: Any,
    family: Family,
    sources: Sequence[Source],
    writer: CacheWriter,
    *,
    root: Path,
    buckets: Sequence[Bucket],
    fps: float | None = None,
    max_upscale: float = 1.5,
    workers: int = 2,
    stop_on_bad: bool = False,
    ranks: EncodingRanks | None = None,
    report: Report = lambda _: None,
) -> tuple[int, list[Skipped]]:
    """Encode media that the cache does not have; files that cannot be used are skipped.

    Args:
        sources: of this rank, or of its group.
        root: folder that the rows' `source` is relative to.
        workers: threads that read and decode files while the VAE encodes.
        stop_on_bad: raise the first MediaError instead of skipping the file.
        ranks: with groups of several ranks, the first rank of a group reads and writes, and all encode.
    Returns: number of samples that were encoded, and what was skipped.
    Raises: CacheError: a file that is stored has changed since.
    """
    ranks = ranks or EncodingRanks()
    encoded, skipped = 0, list[Skipped]()
    for source, loaded in _loaded(sources, writer, root, buckets, fps, max_upscale, workers, ranks):
        if isinstance(loaded, MediaError):
            if stop_on_bad:
                raise loaded
            skipped.append(Skipped(source.file, str(loaded)))
        elif loaded is not None:
            media, row = loaded
            given = {"pixels": media.pixels[None]}
            if media.reference is not None:
                given["reference"] = media.reference[None]
            (sample,) = family.encode_media(pipe, given)
            if ranks.writes_media:
                tokens = family.grid.tokens(family.clean({name: x[None] for name, x in sample.items()}).shape[1:])
                writer.add_media(MediaRow(**row, tokens=tokens), {name: x.cpu() for name, x in sample.items()})
            encoded += 1
        report(1)
    writer.flush()
    return encoded, skipped


def captions_of(sources: Sequence[Source]) -> list[str]:
    """Return the distinct captions in the order of the sources, and the empty caption first."""
    return list(dict.fromkeys(["", *(caption for source in sources for caption in source.captions)]))


Loaded = tuple[LoadedMedia, dict[str, Any]] | MediaError | None


def _loaded(
    sources: Sequence[Source],
    writer: CacheWriter,
    root: Path,
    buckets: Sequence[Bucket],
    fps: float | None,
    max_upscale: float,
    workers: int,
    ranks: EncodingRanks,
) -> Iterator[tuple[Source, Loaded]]:
    """Yield each source with its pixels and row, with the error, or with None if it is stored already."""
    done = writer.done_ids()

    def load(source: Source) -> Loaded:
        try:
            row = _row(source, root)
            if source.id in done:
                _check_unchanged(done[source.id], row, writer.folder)
                return None
            media = load_media(source, buckets, fps=fps, max_upscale=max_upscale)
        except MediaError as error:
            return error
        size, crop = media.bucket, media.crop
        row |= {"frames": size.frames, "height": size.height, "width": size.width, "fps": media.fps}
        return media, {**row, "crop": (crop.top, crop.left, crop.height, crop.width)}

    if not ranks.writes_media:
        for source in sources:
            yield source, ranks.from_writer(None)
        return
    with ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        ahead: deque[tuple[Source, Future[Loaded]]] = deque()
        waiting = iter(sources)
        try:
            while True:
                for source in islice(waiting, workers + 1 - len(ahead)):
                    ahead.append((source, pool.submit(load, source)))
                if not ahead:
                    return
                source, future = ahead.popleft()
                yield source, ranks.from_writer(future.result())
        finally:
            for _, future in ahead:
                future.cancel()


def _row(source: Source, root: Path) -> dict[str, Any]:
    """Return what a row says about a source before it is decoded. Raises: MediaError: the file cannot be read."""
    try:
        with source.file.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MediaError(f"{source.file}: {error.strerror or error}") from error
    inside = source.file.is_relative_to(root)
    return {
        "id": source.id,
        "source": str(source.file.relative_to(root) if inside else source.file),
        "source_hash": content,
        "captions": tuple(caption_hash(caption) for caption in source.captions),
        "repeats": source.repeats,
    }


def _check_unchanged(stored: MediaRow, row: dict[str, Any], folder: Path) -> None:
    names = {"source_hash": "contents", "captions": "captions", "repeats": "repeats"}
    changed = [word for name, word in names.items() if getattr(stored, name) != row[name]]
    if changed:
        raise CacheError(
            f"{stored.id}: its {' and '.join(changed)} changed since it was stored in {folder}: delete the cache, or "
            "choose another output"
        )
