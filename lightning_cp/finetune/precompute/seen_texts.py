"""Encode captions together with the media that they belong to, for text encoders that see the media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_cp.errors import FamilyError, MediaError
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.latent_cache import CacheWriter, caption_hash
from lightning_cp.finetune.media import Source
from lightning_cp.finetune.precompute.encode import batch_of_one
from lightning_cp.finetune.precompute.loading import Loader, media_id
from lightning_cp.finetune.precompute.ranks import EncodingRanks, Report


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
        loader: loader that skips no source (its `done` is empty).
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
    writer.flush()
    return encoded


def _encode(pipe: Any, family: Family, source: Source, writer: CacheWriter, loader: Loader) -> int:
    """Encode the texts of a source that the cache does not have. Returns: their number."""
    sample = media_id(source, loader.hashes.of(source))
    new = [text for text in dict.fromkeys(source.captions) if caption_hash(text, sample) not in writer.done_texts()]
    if not new:
        return 0
    loaded = loader.load(source)
    if isinstance(loaded, MediaError):
        raise loaded
    assert loaded is not None, "this loader knows no stored samples"
    media = batch_of_one(loaded[0])
    for caption in new:
        (text,) = family.encode_text(pipe, [caption], media)
        writer.add_text(caption, {name: x.cpu() for name, x in text.items()}, media_id=sample)
    return len(new)
