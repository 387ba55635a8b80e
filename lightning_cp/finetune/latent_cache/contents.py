"""Read the rows of a cache and compare them with its shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lightning_cp.errors import CacheError
from lightning_cp.finetune.latent_cache.index import CacheIndex, Counts
from lightning_cp.finetune.latent_cache.row_checks import SHARD_NAME
from lightning_cp.finetune.latent_cache.rows import MediaRow, Row, RowsFile, ShardRow, TextRow, caption_hash, read_rows
from lightning_cp.finetune.latent_cache.shards import Layout, again, read_layout

RowT = TypeVar("RowT", MediaRow, TextRow)


@dataclass(frozen=True)
class Contents:
    """All rows of a cache.

    Args:
        media: rows of the samples, ordered by id: the order does not depend on the number of writers.
        unused: rows of stored samples that are no longer in the data, or had other contents (`repeats` is 0).
        texts: rows of the texts by hash.
        shards: rows of the shards by file name.
    """

    media: list[MediaRow]
    unused: list[MediaRow]
    texts: dict[str, TextRow]
    shards: dict[str, ShardRow]

    @property
    def counts(self) -> Counts:
        """Numbers of used samples, texts and shards, and bytes."""
        size = sum(shard.size_bytes for shard in self.shards.values())
        return Counts(len(self.media), len(self.texts), len(self.shards), size)


def rows_files(folder: Path) -> list[Path]:
    """List the rows files of a cache."""
    return sorted(folder.glob("rows-*.jsonl"))


def stored_ids(folder: Path) -> set[str]:
    """Return the ids of the samples in use, also of a cache that is not complete. Raises: CacheError: damaged."""
    rows = (row for path in rows_files(folder) for row in read_rows(path).rows)
    return {row.id for row in rows if isinstance(row, MediaRow) and row.repeats}


def read_contents(folder: Path, cache_id: str) -> Contents:
    """Read all rows. Raises: CacheError: a rows file is damaged, unfinished or of another cache, or rows repeat."""
    files = []
    for path in rows_files(folder):
        files.append(read_rows(path))
        if files[-1].committed_bytes != files[-1].total_bytes:
            raise CacheError(f"{path} ends with an unfinished write: run precompute again to continue")
    return join_rows(files, cache_id)


def join_rows(files: Iterable[RowsFile], cache_id: str) -> Contents:
    """Join rows files. Raises: CacheError: one is of another cache, or an id, text or shard is there twice."""
    media, texts = dict[str, tuple[Path, MediaRow]](), dict[str, tuple[Path, TextRow]]()
    unused, shards = list[MediaRow](), dict[str, ShardRow]()
    for file in files:
        for shard in file.shards:
            if shard.cache != cache_id:
                raise CacheError(f"{file.path} belongs to another cache: remove it and its shards")
            if shard.shard in shards:
                raise CacheError(f"{file.path} is damaged: the shard {shard.shard} is listed twice")
            shards[shard.shard] = shard
        for row in file.rows:
            if isinstance(row, MediaRow) and not row.repeats:
                unused.append(row)
            elif isinstance(row, MediaRow):
                _add(media, row.id, file.path, row)
            else:
                _add(texts, row.hash, file.path, row)
                if caption_hash(row.caption, row.media_id) != row.hash:
                    raise CacheError(f"{file.path} is damaged: the caption of {row.hash} was changed")
    ordered = [row for _, (_, row) in sorted(media.items())]
    return Contents(ordered, unused, {name: row for name, (_, row) in texts.items()}, shards)


def check_contents(folder: Path, contents: Contents, index: CacheIndex) -> dict[type[Row], tuple[str, ...]]:
    """Compare the rows with the headers of the shards; tensors are not read.

    Returns: names of the tensors of every sample, and of every text.
    Raises: CacheError: there are no samples; or a text, tensor or file is missing, unknown, truncated or has another
        shape.
    """
    if not contents.media:
        raise CacheError(f"{folder} has no samples: add some before the cache is finished")
    present = {path.name for path in folder.glob("*.safetensors") if SHARD_NAME.fullmatch(path.name)}
    unknown = sorted(present - contents.shards.keys())
    if unknown:
        raise CacheError(f"{folder / unknown[0]} is in no rows file: run precompute again, which removes it")
    captions = {hash: row.id for row in contents.media for hash in row.captions}
    missing = sorted(captions.keys() - contents.texts.keys())
    if missing:
        raise CacheError(f"{folder} has no text {missing[0]}, a caption of sample {ascii(captions[missing[0]])[:100]}")
    if index.empty_caption is not None and index.empty_caption not in contents.texts:
        raise CacheError(f"{folder} has no text of the empty caption, {index.empty_caption}")
    by_shard = defaultdict[str, list[Row]](list)
    rows: Iterable[Row] = (*contents.media, *contents.unused, *contents.texts.values())
    for row in rows:
        by_shard[row.shard].append(row)
    tensors = _TensorCheck()
    for name, shard in sorted(contents.shards.items()):
        layout = read_layout(folder / name, shard)
        if layout.keys() != {row.key for row in by_shard[name]} or len(layout) != len(by_shard[name]):
            raise CacheError(f"{folder / name} does not hold the samples of its rows. {again(folder / name)}")
        for row in by_shard[name]:
            tensors.check(folder / name, row, layout)
    return {kind: tuple(dtypes) for kind, dtypes in tensors.dtypes.items()}


class _TensorCheck:
    """Check that all samples have the same tensors, so that a batch of one size can be joined."""

    def __init__(self) -> None:
        self.dtypes: dict[type[Row], dict[str, str]] = {}
        self._latents: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def check(self, path: Path, row: Row, layout: Layout) -> None:
        tensors = layout[row.key]
        dtypes = {name: dtype for name, (dtype, _) in tensors.items()}
        expected = self.dtypes.setdefault(type(row), dtypes)
        if dtypes != expected:
            raise CacheError(f"{path}: sample {row.key} has the tensors {dtypes}, but other samples have {expected}")
        if isinstance(row, TextRow):
            if row.length != length_of(shape for _, shape in tensors.values()):
                raise CacheError(f"{path}: the text {row.hash} does not have the {row.length} positions of its row")
        elif "latents" in tensors:
            size, shape = (row.frames, row.height, row.width), tensors["latents"][1]
            first = self._latents.setdefault(size, shape)
            if shape != first:
                raise CacheError(
                    f"{path}: latents of sample {row.key} have shape {list(shape)}, but other samples of {size} "
                    f"(frames, height, width) have {list(first)}"
                )
        both = self.dtypes.get(MediaRow, {}).keys() & self.dtypes.get(TextRow, {}).keys()
        if both:
            raise CacheError(f"{path}: {', '.join(sorted(both))} are names of media tensors and of text tensors")


def length_of(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the number of positions of a text: tensors with positions are [length, dim]. 0 if it has none."""
    return max((shape[0] for shape in shapes if len(shape) == 2), default=0)


def _add(rows: dict[str, tuple[Path, RowT]], name: str, path: Path, row: RowT) -> None:
    if name in rows:
        raise CacheError(f"{ascii(name)[:100]} is stored twice, in {rows[name][0]} and {path}: make the cache again")
    rows[name] = (path, row)
