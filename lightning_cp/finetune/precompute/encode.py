"""Encode captions and media of one rank, and write them to the cache."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.data.keyed_random import RandomStream, keyed_generator
from lightning_cp.errors import FamilyError, MediaError
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.families.latents import main_latents
from lightning_cp.finetune.latent_cache import CacheWriter, MediaRow
from lightning_cp.finetune.media import LoadedMedia, Skipped, Source
from lightning_cp.finetune.precompute.loading import Loader, load_all, media_id
from lightning_cp.finetune.precompute.ranks import EncodingRanks, Report

_MEAN, _STD = -3.0, 0.5  # of the logarithm of the noise's standard deviation, in pixels from -1 to 1


def encode_captions(
    pipe: Any,
    family: Family,
    captions: Sequence[str],
    writer: CacheWriter,
    *,
    batch_size: int = 8,
    ranks: EncodingRanks | None = None,
    report: Report = lambda _: None,
) -> int:
    """Encode captions that the cache does not have. Returns: their number.

    All batches have `batch_size` captions; the last one is filled with empty captions. Kernels round differently for
    other batch sizes, and the result must not depend on the number of ranks or on interruptions.

    Args: captions: distinct captions of this rank.
    """
    ranks, new = ranks or EncodingRanks(), [caption for caption in captions if not writer.take_text(caption)]
    report(len(captions) - len(new))
    for start in range(0, len(new), batch_size):
        ranks.check()
        batch = new[start : start + batch_size]
        samples = family.encode_text(pipe, [*batch, *[""] * (batch_size - len(batch))])
        for caption, sample in zip(batch, samples[: len(batch)], strict=True):
            writer.add_text(caption, sample)
        report(len(batch))
    return len(new)


def encode_sources(
    pipe: Any,
    family: Family,
    sources: Sequence[Source],
    writer: CacheWriter,
    *,
    loader: Loader,
    workers: int = 2,
    stop_on_bad: bool = False,
    ranks: EncodingRanks | None = None,
    report: Report = lambda _: None,
    masks: bool = False,
    image_noise: bool = False,
) -> tuple[set[str], list[Skipped]]:
    """Encode media that the cache does not have; files that cannot be used are skipped.

    Args:
        sources: media files of this rank or of its group.
        workers: threads that read and decode files while the VAE encodes.
        stop_on_bad: raise the first MediaError instead of skipping the file.
        ranks: with groups of several ranks, the first rank of a group reads and writes, and all encode.
        image_noise: add noise to the first frame that the family is conditioned on, see `noised_frame`.
        masks: store a mask of the loss for each sample, also for those without one.
    Returns: ids of the samples that were encoded, and what was skipped.
    """
    ranks = ranks or EncodingRanks()
    encoded, skipped = set[str](), list[Skipped]()
    for source, loaded in load_all(sources, loader, ranks, workers=workers):
        failure = loaded if isinstance(loaded, MediaError) else None
        if isinstance(loaded, tuple):
            media, row = loaded
            try:
                given = batch_of_one(media)
                if image_noise:
                    given["first_frame"] = noised_frame(media.pixels, source.id)[None]
                (sample,) = family.encode_media(pipe, given)
            except FamilyError as error:  # the family does not take this size, or needs a reference
                failure = MediaError(f"{source.file}: {error}")
            else:
                if ranks.writes_media:
                    clean = main_latents(family.clean({name: x[None] for name, x in sample.items()}))
                    tokens = family.grid.tokens(clean.shape[1:])
                    if masks:
                        sample["loss_mask"] = _loss_mask(media.mask, clean)
                    writer.add_media(MediaRow(**row, tokens=tokens), sample)
                encoded.add(source.id)
        if failure is not None and stop_on_bad:
            raise failure
        if failure is not None:
            skipped.append(Skipped(source.file, str(failure)))
        if ranks.writes_media:
            report(1)
    return encoded, skipped


def _loss_mask(mask: Tensor | None, clean: Tensor) -> Tensor:
    """Return the weight of each latent in the loss, the mean of its pixels: it broadcasts to x0 of one sample.

    Args:
        mask: [1, h, w] in pixels; None: all weights are 1.
        clean: x0 [1, ..., h, w].
    """
    size = (clean.shape[-2], clean.shape[-1])
    small = torch.ones(1, *size) if mask is None else F.adaptive_avg_pool2d(mask, size)
    return small.view(*[1] * (clean.dim() - 3), *size)


def captions_of(sources: Sequence[Source]) -> list[str]:
    """Return the distinct captions in the order of the sources, and the empty caption first."""
    return list(dict.fromkeys(["", *(caption for source in sources for caption in source.captions)]))


def batch_of_one(media: LoadedMedia) -> dict[str, Tensor]:
    """Return the media of one sample with a batch dim, for `Family.encode_media`."""
    given = {"pixels": media.pixels[None]}
    for name, x in (("reference", media.reference), ("sound", media.sound)):
        if x is not None:
            given[name] = x[None]
    if media.fps is not None:
        given["fps"] = torch.tensor([media.fps])
    return given


def noised_frame(pixels: Tensor, name: str) -> Tensor:
    """Return the first frame with noise of a random strength, about 0.05. It depends on the sample's name only.

    Args: pixels: [3, f, h, w] in [-1, 1].
    Returns: [3, 1, h, w], not cut to [-1, 1].
    Source: Yang et al., CogVideoX, arXiv:2408.06072, section on image to video.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    generator = keyed_generator(seed, RandomStream.IMAGE_NOISE)
    strength = math.exp(_MEAN + _STD * generator.standard_normal())
    frame = pixels[:, :1]
    noise = torch.from_numpy(generator.standard_normal(tuple(frame.shape), dtype="float32"))
    return frame + strength * noise


def encode_seen_captions(
    pipe: Any,
    family: Family,
    sources: Sequence[Source],
    writer: CacheWriter,
    *,
    loader: Loader,
    stop_on_bad: bool = False,
    ranks: EncodingRanks | None = None,
    report: Report = lambda _: None,
) -> int:
    """Encode each caption of each source with the source's media, one at a time, if the cache does not have it.

    Sources that cannot be used are left out here: `encode_sources` reports them.

    Args:
        sources: media of this rank.
        loader: loader that skips no source (its `writer` is None).
        stop_on_bad: raise the first MediaError instead of leaving the source out.
    Returns: number of texts that were encoded.
    """
    ranks, encoded = ranks or EncodingRanks(), 0
    for source in sources:
        ranks.check()
        try:
            encoded += _encode(pipe, family, source, writer, loader)
        except (MediaError, FamilyError) as error:
            if stop_on_bad:
                raise MediaError(f"{source.file}: {error}" if isinstance(error, FamilyError) else str(error)) from error
        report(1)
    return encoded


def _encode(pipe: Any, family: Family, source: Source, writer: CacheWriter, loader: Loader) -> int:
    sample = media_id(source, loader.hashes.of(source))
    new = [text for text in dict.fromkeys(source.captions) if not writer.take_text(text, sample)]
    if not new:
        return 0
    loaded = loader.load(source)
    if isinstance(loaded, MediaError):
        raise loaded
    assert loaded is not None, "this loader knows no stored samples"
    media = batch_of_one(loaded[0])
    for caption in new:
        (text,) = family.encode_text(pipe, [caption], media)
        writer.add_text(caption, text, media_id=sample)
    return len(new)
