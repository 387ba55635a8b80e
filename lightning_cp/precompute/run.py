"""Precompute a data set: find the media, encode captions and media on all ranks, and complete the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from lightning_cp.errors import CacheError
from lightning_cp.families import Family, family_for
from lightning_cp.latent_cache import CacheIndex, CacheWriter, LatentCache, PreparedCache, fingerprint_of, prepare_cache
from lightning_cp.media import Skipped, Source, find_sources
from lightning_cp.pipelines.encoders import components_on, load_encoders
from lightning_cp.precompute.contact_sheet import draw_contact_sheet
from lightning_cp.precompute.encode import captions_of, encode_captions, encode_sources
from lightning_cp.precompute.ranks import EncodingRanks
from lightning_cp.precompute.sizes import buckets_of
from lightning_cp.vae import parallelize_vae

SKIPPED, SHEET = "skipped.jsonl", "contact_sheet.png"


@dataclass(frozen=True, kw_only=True)
class PrecomputeSettings:
    """How media are encoded.

    Args:
        captions: `required`: media without a caption are skipped; `optional`: they get the empty caption.
        sizes: pairs (height, width); None: see `buckets_of`.
        frames: frames per clip, or several numbers; None: the pipeline's default, and 1 for images.
        fps: frames per second of clips; None: the file's.
        clips: `first`: one clip from the beginning of each video; `all`: as many as it has, one after another.
        max_upscale: media that would be enlarged more are skipped.
        dtype: dtype of the text encoders, and of the stored text.
        vae_dtype: dtype of the VAE, and of the stored latents.
        text_batch: captions that are encoded together.
        tiling: encode in tiles, for media that are too large for the VAE at once. Seams can differ slightly.
        vae_ranks: number of ranks that encode one picture or clip together.
        workers: threads of each rank that read files.
        shard_bytes: approximate size of a shard.
        on_bad: what to do with a file that cannot be used: skip, error.
        sheet: number of samples on the contact sheet; 0: none.
    """

    captions: Literal["required", "optional"] = "required"
    sizes: Sequence[Sequence[int]] | None = None
    frames: int | Sequence[int] | None = None
    fps: float | None = None
    clips: Literal["first", "all"] = "first"
    max_upscale: float = 1.5
    dtype: torch.dtype = torch.bfloat16
    vae_dtype: torch.dtype = torch.float32
    text_batch: int = 8
    tiling: bool = False
    vae_ranks: int = 1
    workers: int = 2
    shard_bytes: int = 256_000_000
    on_bad: Literal["skip", "error"] = "skip"
    sheet: int = 16


@dataclass(frozen=True)
class Precomputed:
    """What a run did. `found` is the sum of `encoded`, `stored` and the number of `skipped`.

    Attributes:
        found: number of sources.
        encoded: samples that this run encoded.
        stored: samples that an earlier run had stored.
        captions: distinct captions, with the empty one.
        skipped: files that could not be used.
    """

    found: int
    encoded: int
    stored: int
    captions: int
    skipped: tuple[Skipped, ...]


def precompute(
    pretrained: str,
    data: Path,
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
        data: folder or table of media, see `find_sources`.
        device: of this rank's encoders.
        ranks: from `EncodingRanks.of_world`; None: one process.
        progress: show progress bars on rank 0.
    Ranks: the whole world; the media must be readable and the cache writable on every rank.
    Raises: ValueError (DataError, MediaError, FamilyError, CacheError): the data, the pipeline or the cache.
    """
    ranks = ranks or EncodingRanks()
    clip_frames = settings.frames if isinstance(settings.frames, int) else None
    found = ranks.on_first(
        lambda: find_sources(
            data, captions=settings.captions, clips=settings.clips, clip_frames=clip_frames, fps=settings.fps
        )
    )
    pipe = load_encoders(pretrained, settings.dtype, vae_dtype=settings.vae_dtype)
    if settings.tiling:
        pipe.vae.enable_tiling()
    family = family_for(pipe)
    kinds = {"video" if source.is_video else "image" for source in found.sources}
    buckets = buckets_of(pipe, family, sizes=settings.sizes, frames=settings.frames, kinds=kinds)
    captions = captions_of(found.sources)

    with _prepared(ranks, output, family, pipe, settings, found.sources) as prepared:
        with CacheWriter(output, rank=ranks.rank, shard_bytes=settings.shard_bytes) as writer:
            show = progress and ranks.rank == 0
            mine = captions[ranks.rank :: ranks.size]
            with components_on(pipe, family.components.text, device), _bar("captions", len(mine), show) as report:
                encode_captions(pipe, family, mine, writer, batch_size=settings.text_batch, report=report)
            sources = found.sources[ranks.data_rank :: ranks.data_size]
            with components_on(pipe, family.components.media, device), _bar("media", len(sources), show) as report:
                undo = None if ranks.groups is None else parallelize_vae(pipe.vae, ranks.groups)
                encoded, skipped = encode_sources(
                    pipe,
                    family,
                    sources,
                    writer,
                    root=data if data.is_dir() else data.parent,
                    buckets=buckets,
                    fps=settings.fps,
                    max_upscale=settings.max_upscale,
                    workers=settings.workers,
                    stop_on_bad=settings.on_bad == "error",
                    ranks=ranks,
                    report=report,
                )
                if undo is not None:  # rank 0 alone draws the contact sheet
                    undo()
        parts = ranks.gather((encoded, skipped) if ranks.writes_media else (0, []))
        result = _result(found.sources, found.skipped, captions, parts)
        ranks.on_first(lambda: _complete(prepared, output, result))
    if settings.sheet:
        with components_on(pipe, family.components.media, device):
            ranks.on_first(lambda: draw_contact_sheet(pipe.vae, LatentCache(output), output / SHEET, settings.sheet))
    return result


@contextmanager
def _prepared(
    ranks: EncodingRanks,
    output: Path,
    family: Family,
    pipe: Any,
    settings: PrecomputeSettings,
    sources: Sequence[Source],
) -> Iterator[PreparedCache | None]:
    """Lock the cache on rank 0 while all ranks write."""
    made: list[PreparedCache] = []
    names = dict.fromkeys((*family.components.text, *family.components.media))

    def prepare() -> None:
        identity = {name: str(getattr(settings, name)) for name in _IDENTITY}
        fingerprint = fingerprint_of(pipe, names, identity)
        plain = {name: value if _is_plain(value) else str(value) for name, value in asdict(settings).items()}
        index = CacheIndex(family.name, family.facts, fingerprint, settings=plain, planned_samples=len(sources))
        made.append(prepare_cache(output, index))
        _check_all_wanted(made[0], sources, output)

    try:
        ranks.on_first(prepare)
        yield made[0] if made else None
    finally:
        for prepared in made:
            prepared.release()


_IDENTITY = ("sizes", "frames", "fps", "clips", "dtype", "vae_dtype", "tiling", "max_upscale")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list))


def _check_all_wanted(prepared: PreparedCache, sources: Sequence[Source], output: Path) -> None:
    """Raise CacheError if the cache has samples that are not in the data."""
    wanted = {source.id for source in sources}
    others = [row.id for row in prepared.contents.media if row.id not in wanted]
    if others:
        raise CacheError(
            f"{output} has {len(others)} samples that are no longer in the data, such as {others[0]}: delete the "
            "cache, or choose another output"
        )


@contextmanager
def _bar(name: str, total: int, show: bool) -> Iterator[Any]:
    with tqdm(total=total, desc=name, unit=f" {name}", disable=not show, mininterval=1.0) as bar:
        yield bar.update


def _result(
    sources: Sequence[Source],
    unused: Sequence[Skipped],
    captions: Sequence[str],
    parts: Sequence[tuple[int, list[Skipped]]],
) -> Precomputed:
    encoded = sum(count for count, _ in parts)
    skipped = (*unused, *(one for _, some in parts for one in some))
    found = len(sources) + len(unused)
    return Precomputed(found, encoded, found - encoded - len(skipped), len(captions), tuple(skipped))


def _complete(prepared: PreparedCache | None, output: Path, result: Precomputed) -> None:
    """Write what was skipped, and complete the cache. Raises: CacheError: no file could be used."""
    assert prepared is not None, "rank 0 has prepared it"
    rows = [json.dumps({"file": str(one.file), "reason": one.reason}, ensure_ascii=False) for one in result.skipped]
    (output / SKIPPED).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    if result.encoded + result.stored == 0:
        raise CacheError(f"none of the {result.found} files could be used; {output / SKIPPED} has the reasons")
    prepared.finish()
