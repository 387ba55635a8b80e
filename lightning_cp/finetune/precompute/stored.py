"""Compare the samples of a cache with the data, before anything is encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from lightning_cp.errors import MediaError
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.latent_cache import MediaRow, PreparedCache
from lightning_cp.finetune.media import Source
from lightning_cp.finetune.precompute.hashes import FileHashes
from lightning_cp.finetune.precompute.loading import changing_fields
from lightning_cp.finetune.precompute.ranks import EncodingRanks, Report
from lightning_cp.finetune.precompute.terminal import progress_bar


def update_stored(
    prepared: PreparedCache | None,
    sources: Sequence[Source],
    family: Family,
    *,
    hashes: FileHashes,
    workers: int,
    ranks: EncodingRanks,
    progress: bool,
) -> tuple[int, int]:
    """Mark each stored sample as used, with its current captions, or as unused: its file is gone or has changed.

    Nothing is deleted. A file that gets its old contents back need not be encoded again, and a run that reads the cache
    at the same time keeps reading the samples that it knows.

    Args:
        prepared: the cache, on rank 0. No rank has opened its writer.
        workers: threads that read files.
        progress: show a progress bar on rank 0.
    Ranks: the whole world; each reads a share of the files.
    Returns: number of stored samples with other contents, and of stored samples that are no longer in the data.
    """
    stored = ranks.on_first(lambda: _stored_ids(prepared))
    compared = [source for source in sources if source.id in stored]
    mine = compared[ranks.rank :: ranks.size]
    with (
        progress_bar("stored samples", len(compared), progress and ranks.rank == 0 and bool(compared)) as bar,
        ranks.phase(bar) as report,
    ):
        read = _read(mine, hashes, workers, ranks, report)
    contents = {id: hash for part in ranks.gather(read) for id, hash in part.items()}
    return ranks.on_first(lambda: _update(prepared, sources, contents, family))


def _stored_ids(prepared: PreparedCache | None) -> set[str]:
    assert prepared is not None, "rank 0 has prepared it"
    return {row.id for row in (*prepared.contents.media, *prepared.contents.unused)}


def _read(
    sources: Sequence[Source], hashes: FileHashes, workers: int, ranks: EncodingRanks, report: Report
) -> dict[str, str]:
    """Return the hash of each source's contents by id, without the sources that cannot be read."""

    def hash_of(source: Source) -> str | None:
        try:
            return hashes.of(source)
        except MediaError:
            return None  # it is read again to be encoded, and skipped with the reason

    found = dict[str, str]()
    with ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        for source, hash in zip(sources, pool.map(hash_of, sources), strict=True):
            ranks.check()
            if hash is not None:
                found[source.id] = hash
            report(1)
    return found


def _update(
    prepared: PreparedCache | None, sources: Sequence[Source], contents: Mapping[str, str], family: Family
) -> tuple[int, int]:
    """Replace the rows that are no longer true. Args: contents: hashes of the stored samples that are in the data."""
    assert prepared is not None, "rank 0 has prepared it"
    wanted, before = {source.id: source for source in sources}, prepared.contents
    used, unused, old = dict[str, MediaRow](), list[MediaRow](), {*before.media, *before.unused}
    for row in (*before.media, *before.unused):
        if row.id not in used and contents.get(row.id) == row.source_hash:
            used[row.id] = replace(row, **changing_fields(wanted[row.id], row.source_hash, family))
        else:
            unused.append(replace(row, repeats=0))
    # in this order, a run that is killed between the two writes never leaves two used rows of one sample
    prepared.replace_rows(row for row in unused if row not in old)
    prepared.replace_rows(row for row in used.values() if row not in old)
    changed = {row.id for row in unused if row.id in contents} - used.keys()
    return len(changed), sum(row.id not in wanted for row in before.media)
