"""Encode captions and media of one rank, and write them to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.errors import FamilyError, MediaError
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.families.latents import main_latents
from lightning_cp.finetune.latent_cache import CacheWriter, MediaRow, caption_hash
from lightning_cp.finetune.media import LoadedMedia, Skipped, Source
from lightning_cp.finetune.precompute.image_noise import noised_frame
from lightning_cp.finetune.precompute.loading import Loader, load_all
from lightning_cp.finetune.precompute.ranks import EncodingRanks, Report


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
    done, ranks = writer.done_texts(), ranks or EncodingRanks()
    new = [caption for caption in captions if caption_hash(caption) not in done]
    report(len(captions) - len(new))
    for start in range(0, len(new), batch_size):
        ranks.check()
        batch = new[start : start + batch_size]
        samples = family.encode_text(pipe, [*batch, *[""] * (batch_size - len(batch))])
        for caption, sample in zip(batch, samples[: len(batch)], strict=True):
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
    loader: Loader,
    workers: int = 2,
    stop_on_bad: bool = False,
    ranks: EncodingRanks | None = None,
    report: Report = lambda _: None,
    masks: bool = False,
    image_noise: bool = False,
) -> tuple[int, list[Skipped]]:
    """Encode media that the cache does not have; files that cannot be used are skipped.

    Args:
        sources: media files of this rank or of its group.
        workers: threads that read and decode files while the VAE encodes.
        stop_on_bad: raise the first MediaError instead of skipping the file.
        ranks: with groups of several ranks, the first rank of a group reads and writes, and all encode.
        image_noise: add noise to the first frame that the family is conditioned on, see `noised_frame`.
        masks: store a mask of the loss for each sample, also for those without one.
    Returns: number of samples that were encoded, and what was skipped.
    """
    ranks = ranks or EncodingRanks()
    encoded, skipped = 0, list[Skipped]()
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
                    writer.add_media(MediaRow(**row, tokens=tokens), {name: x.cpu() for name, x in sample.items()})
                encoded += 1
        if failure is not None and stop_on_bad:
            raise failure
        if failure is not None:
            skipped.append(Skipped(source.file, str(failure)))
        if ranks.writes_media:
            report(1)
    writer.flush()
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
