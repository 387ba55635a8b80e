"""Precompute a data set: find the media, encode captions and media on all ranks, and complete the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_cp.errors import CacheError, DataError, MediaError
from lightning_cp.files import writing, writing_new
from lightning_cp.finetune.encoder_files import SETTING, describe_files
from lightning_cp.finetune.encoders import components_on, load_encoders, release
from lightning_cp.finetune.families import Family, family_for
from lightning_cp.finetune.latent_cache import (
    CacheIndex,
    CacheWriter,
    LatentCache,
    PreparedCache,
    fingerprint_of,
    prepare_cache,
)
from lightning_cp.finetune.latent_cache.contents import stored_ids
from lightning_cp.finetune.media import DataFolder, Skipped, Source, Sources
from lightning_cp.finetune.media.load import check_header
from lightning_cp.finetune.media.source import first_reasons
from lightning_cp.finetune.precompute.contact_sheet import draw_contact_sheet
from lightning_cp.finetune.precompute.data import find_data, has_masks, usable_data
from lightning_cp.finetune.precompute.encode import captions_of, encode_captions, encode_sources
from lightning_cp.finetune.precompute.hashes import FileHashes
from lightning_cp.finetune.precompute.loading import Loader
from lightning_cp.finetune.precompute.ranks import EncodingRanks, Report
from lightning_cp.finetune.precompute.seen_texts import encode_seen_captions
from lightning_cp.finetune.precompute.settings import Precomputed, PrecomputeSettings
from lightning_cp.finetune.precompute.stored import update_stored
from lightning_cp.finetune.precompute.terminal import progress_bar, quiet_packages
from lightning_cp.finetune.precompute.usable import SHEET, Buckets, buckets_for, some_left
from lightning_cp.vae import parallelize_vae

SKIPPED = "skipped.jsonl"


@dataclass(frozen=True)
class _Run:
    """Objects that all phases of a run use."""

    pretrained: str
    data: Sequence[DataFolder]
    output: Path
    settings: PrecomputeSettings
    device: torch.device
    ranks: EncodingRanks
    progress: bool
    hashes: FileHashes = field(default_factory=FileHashes)

    @contextmanager
    def phase(self, name: str, total: int, pipe: Any, parts: Sequence[str]) -> Iterator[tuple[CacheWriter, Report]]:
        """Open a writer, put parts of the pipeline on the device, and show progress. Ranks: the whole world."""
        rank, shard_bytes = self.ranks.rank, self.settings.shard_bytes
        with (
            progress_bar(name, total, self.progress and rank == 0) as bar,
            self.ranks.phase(bar) as report,
            _disk_errors(self.output),
            CacheWriter(self.output, rank=rank, shard_bytes=shard_bytes) as writer,
            components_on(pipe, parts, self.device),
        ):
            yield writer, report


def precompute(
    pretrained: str,
    data: Path | Sequence[DataFolder],
    output: Path,
    *,
    settings: PrecomputeSettings,
    device: torch.device,
    ranks: EncodingRanks | None = None,
    progress: bool = False,
) -> Precomputed:
    """Encode a data set into the cache `output`, or continue a run that was interrupted.

    Args:
        pretrained: folder of a pipeline, or its name on the Hub.
        data: folder or table of media, see `find_sources`; or several with their settings.
        device: device of this rank's encoders.
        ranks: from `EncodingRanks.of_world`; None: one process.
        progress: show progress bars on rank 0.
    Ranks: the whole world; the media must be readable and the cache writable on every rank. An exception on one rank
        is raised on all of them.
    Raises: ValueError (MediaError, FamilyError, CacheError), DataError: the data, the pipeline or the cache.
    """
    folders = [DataFolder(path=data)] if isinstance(data, Path) else data
    run = _Run(pretrained, folders, output, settings, device, ranks or EncodingRanks(), progress)
    found = run.ranks.on_first(lambda: find_data(folders, output, settings))
    with quiet_packages(progress):
        with run.ranks.phase():
            pipe = load_encoders(pretrained, settings.dtype, weights=False)
            family = family_for(pipe)
            found, buckets = usable_data(found, pipe, family, settings)
        fitting = _without_unfit(run, family, found, buckets)
        with run.ranks.phase():
            pipe = load_encoders(pretrained, settings.dtype, vae_dtype=settings.vae_dtype)
            if settings.tiling:
                pipe.vae.enable_tiling()
            family = family_for(pipe)
        with _prepared(run, pipe, family, found.sources) as prepared:
            with _disk_errors(output):
                changed, dropped = update_stored(
                    prepared,
                    found.sources,
                    family,
                    hashes=run.hashes,
                    workers=settings.workers,
                    ranks=run.ranks,
                    progress=progress,
                )
            result = replace(_encode(run, pipe, family, fitting, buckets), changed=changed, dropped=dropped)
            run.ranks.on_first(lambda: _complete(prepared, output, result))
        if settings.sheet:
            with components_on(pipe, family.components.media, device):
                decode = partial(family.decode, pipe.vae)
                run.ranks.on_first(
                    lambda: draw_contact_sheet(decode, LatentCache(output), output / SHEET, settings.sheet)
                )
    return result


def _encode(run: _Run, pipe: Any, family: Family, found: Sources, buckets: Buckets) -> Precomputed:
    """Encode what the cache does not have. Ranks: the whole world."""
    settings, ranks = run.settings, run.ranks
    loader = Loader(buckets, (), settings.fps, settings.max_upscale, family, run.hashes)
    masks = has_masks(found.sources)
    captions, encoded_captions = _encode_texts(run, pipe, family, found, loader)
    release(pipe, [name for name in family.components.text if name not in family.components.media])
    result: tuple[int, list[Skipped]] = 0, []
    with (
        run.phase("samples", len(found.sources), pipe, family.components.media) as (writer, report),
        ExitStack() as stack,
    ):
        if ranks.groups is not None:
            stack.callback(parallelize_vae(pipe.vae, ranks.groups))
        result = encode_sources(
            pipe,
            family,
            found.sources[ranks.data_rank :: ranks.data_size],
            writer,
            loader=replace(loader, done=writer.done_ids()),
            workers=settings.workers,
            stop_on_bad=settings.on_bad == "error",
            ranks=ranks,
            report=report,
            masks=masks,
            image_noise=settings.image_noise,
        )
    done = _result(found, captions, ranks.gather(result if ranks.writes_media else (0, [])))
    return replace(done, encoded_captions=sum(ranks.gather(encoded_captions)))


def _without_unfit(run: _Run, family: Family, found: Sources, buckets: Buckets) -> Sources:
    """Skip media that are too small or too short before any weights are loaded; not those that are stored.

    Ranks: the whole world.

    Raises: MediaError: one is, with `on_bad=error`. DataError: all are.
    """
    ranks, settings, unfit = run.ranks, run.settings, dict[str, Skipped]()
    stored = ranks.on_first(lambda: stored_ids(run.output))
    with (
        progress_bar("headers", len(found.sources), run.progress and ranks.rank == 0) as bar,
        ranks.phase(bar) as report,
    ):
        for source in found.sources[ranks.rank :: ranks.size]:
            ranks.check()
            try:
                if source.id not in stored:
                    check_header(
                        source,
                        buckets_for(source, buckets),
                        fps=settings.fps,
                        max_upscale=settings.max_upscale,
                        reference_size=family.reference_size,
                    )
            except MediaError as error:
                if settings.on_bad == "error":
                    raise
                unfit[source.id] = Skipped(source.file, str(error))
            report(1)
    all_unfit = {id: one for part in ranks.gather(unfit) for id, one in part.items()}
    kept = tuple(source for source in found.sources if source.id not in all_unfit)
    return some_left(Sources(kept, (*found.skipped, *all_unfit.values())), of=len(found.sources))


def _encode_texts(run: _Run, pipe: Any, family: Family, found: Sources, loader: Loader) -> tuple[int, int]:
    """Encode the texts that the cache does not have. Ranks: the whole world.

    Returns: number of distinct texts, and of those that this rank encoded.
    """
    settings, ranks, encoding = run.settings, run.ranks, family.components.text
    if family.text.sees_media:
        with run.phase("captions", len(found.sources), pipe, encoding) as (writer, report):
            encoded = encode_seen_captions(
                pipe,
                family,
                found.sources[ranks.rank :: ranks.size],
                writer,
                loader=loader,
                stop_on_bad=settings.on_bad == "error",
                ranks=ranks,
                report=report,
            )
        return sum(len(set(source.captions)) for source in found.sources), encoded
    captions = captions_of(found.sources)
    with run.phase("captions", len(captions), pipe, encoding) as (writer, report):
        mine = captions[ranks.rank :: ranks.size]
        encoded = encode_captions(
            pipe, family, mine, writer, batch_size=settings.text_batch, ranks=ranks, report=report
        )
    return len(captions), encoded


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Raise CacheError instead of OSError."""
    try:
        with writing(folder):
            yield
    except OSError as error:
        raise CacheError(str(error)) from error


@contextmanager
def _prepared(run: _Run, pipe: Any, family: Family, sources: Sequence[Source]) -> Iterator[PreparedCache | None]:
    """Lock the cache on rank 0 while all ranks write."""
    made: list[PreparedCache] = []
    names = dict.fromkeys((*family.components.text, *family.components.media))

    def prepare() -> None:
        identity = {**run.settings.identity(), "masks": has_masks(sources)}
        fingerprint = fingerprint_of(pipe, names, identity)
        values = {**run.settings.plain(), SETTING: describe_files(run.pretrained, names)}
        index = CacheIndex(family.name, family.facts, fingerprint, settings=values, planned_samples=len(sources))
        if family.text.sees_media:
            index = replace(index, empty_caption=None)
        with _disk_errors(run.output):
            made.append(prepare_cache(run.output, index))

    try:
        run.ranks.on_first(prepare)
        yield made[0] if made else None
    finally:
        for prepared in made:
            prepared.release()


def _result(found: Sources, captions: int, parts: Sequence[tuple[int, list[Skipped]]]) -> Precomputed:
    encoded = sum(count for count, _ in parts)
    skipped = (*found.skipped, *(one for _, some in parts for one in some))
    number = len(found.sources) + len(found.skipped)
    return Precomputed(number, encoded, number - encoded - len(skipped), captions, skipped)


def _complete(prepared: PreparedCache | None, output: Path, result: Precomputed) -> None:
    """Write what was skipped, and complete the cache. Raises: DataError: no file could be used."""
    assert prepared is not None, "rank 0 has prepared it"
    with _disk_errors(output):
        rows = [json.dumps(_skipped_row(one), ensure_ascii=False) for one in result.skipped]
        text = "".join(f"{row}\n" for row in rows)
        with writing_new(output / SKIPPED) as path:
            path.write_text(text, encoding="utf-8", errors="surrogateescape")
        if result.encoded + result.stored == 0:
            raise DataError(
                f"none of the {result.found} files could be used: {first_reasons(result.skipped)}. "
                f"{output / SKIPPED} has all reasons"
            )
        prepared.finish()


def _skipped_row(one: Skipped) -> Mapping[str, str]:
    return {"file": str(one.file), "reason": one.reason}
