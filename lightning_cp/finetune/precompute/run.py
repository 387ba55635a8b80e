"""Precompute a data set: find the media, encode captions and media on all ranks, and complete the cache."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from lightning_cp.errors import CacheError, DataError, MediaError
from lightning_cp.files import writing
from lightning_cp.finetune.encoder_files import SETTING, describe_files
from lightning_cp.finetune.encoders import components_on, load_encoders, release
from lightning_cp.finetune.families import Family, family_for
from lightning_cp.finetune.latent_cache import CacheIndex, CacheWriter, LatentCache, fingerprint_of, prepare_cache
from lightning_cp.finetune.latent_cache.rows import MediaRow, Row, listed_ids
from lightning_cp.finetune.latent_cache.store import write_file
from lightning_cp.finetune.media import DataFolder, Skipped, Source, Sources
from lightning_cp.finetune.media.load import check_header
from lightning_cp.finetune.media.source import first_reasons
from lightning_cp.finetune.precompute.encode import captions_of, encode_captions, encode_seen_captions, encode_sources
from lightning_cp.finetune.precompute.loading import FileHashes, Loader
from lightning_cp.finetune.precompute.ranks import EncodingRanks, Report
from lightning_cp.finetune.precompute.usable import (
    SHEET,
    Buckets,
    buckets_for,
    find_data,
    has_masks,
    some_left,
    usable_data,
)
from lightning_cp.finetune.settings import PrecomputeSettings
from lightning_cp.sampling.tiles import tile, write_png
from lightning_cp.vae import parallelize_vae

SKIPPED = "skipped.jsonl"
_PIXELS = 192  # longer side of a thumbnail
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {rate_noinv_fmt}, {remaining} left"
_UNIMPORTANT = ("requires torchvision (not installed)",)  # the Pillow version does the same


@dataclass(frozen=True)
class Precomputed:
    """Result of a run. `found` is the sum of `encoded`, `stored` and the number of `skipped`.

    Attributes:
        found: number of sources.
        encoded: samples that this run encoded.
        stored: samples that an earlier run had stored.
        captions: distinct captions, with the empty one; if the text encoder sees the media, captions of all samples.
        skipped: files that could not be used.
        changed: samples that were stored with other contents; they are among the encoded or skipped ones.
        dropped: stored samples that are no longer in the data.
        encoded_captions: captions that this run encoded.
    """

    found: int
    encoded: int
    stored: int
    captions: int
    skipped: tuple[Skipped, ...]
    changed: int = 0
    dropped: int = 0
    encoded_captions: int = 0


@dataclass(frozen=True)
class _Run:
    pretrained: str
    data: Sequence[DataFolder]
    output: Path
    settings: PrecomputeSettings
    device: torch.device
    ranks: EncodingRanks
    progress: bool
    hashes: FileHashes = field(default_factory=FileHashes)

    @contextmanager
    def phase(self, name: str, total: int, pipe: Any, parts: Sequence[str]) -> Iterator[Report]:
        """Put parts of the pipeline on the device, and show progress. Ranks: the whole world."""
        with (
            progress_bar(name, total, self.progress and self.ranks.rank == 0) as bar,
            self.ranks.phase(bar) as report,
            _disk_errors(self.output),
            components_on(pipe, parts, self.device),
        ):
            yield report


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
            pipe = load_encoders(pretrained, getattr(torch, settings.dtype), weights=False)
            family = family_for(pipe)
            found, buckets = usable_data(found, pipe, family, settings)
        before = run.ranks.on_first(lambda: listed_ids(output))
        fitting = _without_unfit(run, family, found, buckets, before)
        with run.ranks.phase():
            dtype, vae_dtype = getattr(torch, settings.dtype), getattr(torch, settings.vae_dtype)
            pipe = load_encoders(pretrained, dtype, vae_dtype=vae_dtype)
            if settings.tiling:
                pipe.vae.enable_tiling()
            family = family_for(pipe)
        run.ranks.on_first(lambda: _prepare(run, pipe, family, found.sources))
        result = _encode(run, pipe, family, fitting, buckets, before)
        if settings.sheet:
            with components_on(pipe, family.components.media, device):
                decode = partial(family.decode, pipe.vae)
                run.ranks.on_first(
                    lambda: draw_contact_sheet(decode, LatentCache(output), output / SHEET, settings.sheet)
                )
    return result


def _encode(run: _Run, pipe: Any, family: Family, found: Sources, buckets: Buckets, before: Set[str]) -> Precomputed:
    """Encode what the cache does not have, and complete it. Args: before: ids that it had. Ranks: the whole world."""
    settings, ranks = run.settings, run.ranks
    loader = Loader(buckets, None, settings.fps, settings.max_upscale, family, run.hashes)
    with ranks.phase():
        writer = CacheWriter(run.output)
    captions, encoded_captions = _encode_texts(run, pipe, family, found, loader, writer)
    release(pipe, [name for name in family.components.text if name not in family.components.media])
    result: tuple[set[str], list[Skipped]] = set(), []
    with run.phase("samples", len(found.sources), pipe, family.components.media) as report, ExitStack() as stack:
        if ranks.groups is not None:
            stack.callback(parallelize_vae(pipe.vae, ranks.groups))
        result = encode_sources(
            pipe,
            family,
            found.sources[ranks.data_rank :: ranks.data_size],
            writer,
            loader=replace(loader, writer=writer),
            workers=settings.workers,
            stop_on_bad=settings.on_bad == "error",
            ranks=ranks,
            report=report,
            masks=has_masks(found.sources),
            image_noise=settings.image_noise,
        )
    part = result if ranks.writes_media else (set[str](), [])
    encoded_ids, skips, all_rows, texts = zip(*ranks.gather((*part, writer.rows, encoded_captions)), strict=True)
    encoded, ids = set[str]().union(*encoded_ids), {source.id for source in found.sources}
    rows = [row for some in all_rows for row in some]
    now = {row.id for row in rows if isinstance(row, MediaRow)}
    done = Precomputed(
        found=len(found.sources) + len(found.skipped),
        encoded=len(encoded),
        stored=len(now - encoded),
        captions=captions,
        skipped=(*found.skipped, *(one for some in skips for one in some)),
        changed=len(before & (encoded | ids - now)),
        dropped=len(before - ids),
        encoded_captions=sum(texts),
    )
    ranks.on_first(lambda: _complete(run.output, writer, rows, done))
    return done


def _without_unfit(run: _Run, family: Family, found: Sources, buckets: Buckets, stored: Set[str]) -> Sources:
    """Skip media that are too small or too short before any weights are loaded; not those that are stored.

    Ranks: the whole world.

    Raises: MediaError: one is, with `on_bad=error`. DataError: all are.
    """
    ranks, settings, unfit = run.ranks, run.settings, dict[str, Skipped]()
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


def _encode_texts(
    run: _Run, pipe: Any, family: Family, found: Sources, loader: Loader, writer: CacheWriter
) -> tuple[int, int]:
    """Encode the texts that the cache does not have. Ranks: the whole world.

    Returns: number of distinct texts, and of those that this rank encoded.
    """
    settings, ranks, encoding = run.settings, run.ranks, family.components.text
    if family.text.sees_media:
        with run.phase("captions", len(found.sources), pipe, encoding) as report:
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
    with run.phase("captions", len(captions), pipe, encoding) as report:
        mine = captions[ranks.rank :: ranks.size]
        encoded = encode_captions(
            pipe, family, mine, writer, batch_size=settings.text_batch, ranks=ranks, report=report
        )
    return len(captions), encoded


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        with writing(folder):
            yield
    except OSError as error:
        raise CacheError(str(error)) from error


def _prepare(run: _Run, pipe: Any, family: Family, sources: Sequence[Source]) -> None:
    names = dict.fromkeys((*family.components.text, *family.components.media))
    fingerprint = fingerprint_of(pipe, names, {**run.settings.identity(), "masks": has_masks(sources)})
    values = {**run.settings.plain(), SETTING: describe_files(run.pretrained, names)}
    index = CacheIndex(family.name, family.facts, fingerprint, settings=values)
    if family.text.sees_media:
        index = replace(index, empty_caption=None)
    with _disk_errors(run.output):
        prepare_cache(run.output, index)


def _complete(output: Path, writer: CacheWriter, rows: Iterable[Row], result: Precomputed) -> None:
    """Write what was skipped, and complete the cache. Raises: DataError: no file could be used."""
    with _disk_errors(output):
        skipped = [{"file": str(one.file), "reason": one.reason} for one in result.skipped]
        text = "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in skipped)
        write_file(output, SKIPPED, text.encode("utf-8", "surrogateescape"))
        if result.encoded + result.stored == 0:
            raise DataError(
                f"none of the {result.found} files could be used: {first_reasons(result.skipped)}. "
                f"{output / SKIPPED} has all reasons"
            )
        writer.finish(rows)


def draw_contact_sheet(decode: Callable[[Tensor], Tensor], cache: LatentCache, path: Path, count: int) -> None:
    """Decode some samples, evenly spaced by id, and draw their middle frames: crops and colours as they are trained.

    Args:
        decode: returns pixels in [0, 1] of stored latents, both with a batch dim.
        count: largest number of samples.
    """
    number = min(count, len(cache))
    thumbnails = []
    for i in range(number):
        pixels = decode(cache.sample(i * len(cache) // number)["latents"][None])
        frame = pixels if pixels.dim() == 4 else pixels[:, :, pixels.shape[2] // 2]
        height, width = frame.shape[-2:]
        scale = _PIXELS / max(height, width)
        size = [max(1, round(side * scale)) for side in (height, width)]
        small = F.interpolate(frame.cpu(), size=size, mode="bilinear", antialias=True).clamp(0, 1)
        thumbnail = torch.ones(1, 3, _PIXELS, _PIXELS)
        thumbnail[:, :, : size[0], : size[1]] = small
        thumbnails.append(thumbnail)
    write_png(tile(torch.cat(thumbnails), value_range=(0.0, 1.0)), path)


@contextmanager
def progress_bar(name: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Show the number of items, items per second and the time left. Yields: function to call with the number done.

    Without a terminal, it is written once a minute, so that a log stays short.
    """
    every_s = 0.5 if sys.stderr.isatty() else 60.0
    with tqdm(
        total=total, desc=name, unit=f" {name}", disable=not show, mininterval=every_s, bar_format=_FORMAT, miniters=1
    ) as bar:

        def done(number: int) -> None:
            bar.update(number - bar.n)

        yield done


@contextmanager
def quiet_packages(show_bars: bool) -> Iterator[None]:
    """Within this context, let diffusers and transformers print each message once.

    A message such as "the input was truncated" would otherwise appear for every long caption.

    Args: show_bars: show their progress bars; they are hidden without a terminal in any case.
    """
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    with ExitStack() as stack:
        for package in (of_diffusers, of_transformers):
            package.get_logger()  # adds the handler
            for handler in logging.getLogger(package.__name__.partition(".")[0]).handlers:
                once = _Once()
                handler.addFilter(once)
                stack.callback(handler.removeFilter, once)
            if package.is_progress_bar_enabled() and not (show_bars and sys.stderr.isatty()):
                package.disable_progress_bar()
                stack.callback(package.enable_progress_bar)
        yield


class _Once(logging.Filter):
    """Let the first message of each line of code pass."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, int]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        line = (record.pathname, record.lineno)
        if line in self._seen or any(text in str(record.msg) for text in _UNIMPORTANT):
            return False
        self._seen.add(line)
        return True
