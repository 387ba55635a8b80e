"""A small cache with known contents, for the tests of the cache and for those that kill its writers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lightning_cp.families import Sample
from lightning_cp.latent_cache import CacheIndex, CacheWriter, LatentCache, MediaRow, caption_hash, prepare_cache

FACTS: dict[str, Any] = {"pixels": 16, "latents_mean": [0.0], "latents_std": [1.0], "text_length": 512, "shift": 1.0}
CAPTIONS = ["", *(f"caption {i} ünïcode \ud800" for i in range(6))]


def index(**changes: Any) -> CacheIndex:
    values: dict[str, Any] = {
        "family": "qwen_image",
        "facts": FACTS,
        "fingerprint": {"vae.weights": "abc", "package.torch": "2.11.0"},
    }
    return CacheIndex(**(values | changes))


def media(i: int) -> Sample:
    """Tensors of a sample, with every bit drawn at random (NaNs too); a view, not contiguous."""
    height = 2 + 2 * (i % 2)
    bits = torch.randint(-(1 << 15), 1 << 15, (4, 3, height), generator=torch.Generator().manual_seed(i)).short()
    return {"latents": bits.view(torch.bfloat16).transpose(0, 1), "latents_std": torch.full((3, 4, height), i / 3)}


def text(caption: str) -> Sample:
    i = CAPTIONS.index(caption)
    generator = torch.Generator().manual_seed(1000 + i)
    return {"prompt_embeds": torch.randn(i + 1, 5, generator=generator).bfloat16(), "mask": torch.tensor([i > 2, True])}


def row(i: int, **changes: Any) -> MediaRow:
    captions = (caption_hash(CAPTIONS[1 + i % 6]), caption_hash(CAPTIONS[1 + (i + 1) % 6]))
    values: dict[str, Any] = {
        "id": f"sample-{i:04d}",
        "source": f"clips/{i}.mp4",
        "source_hash": f"{i:x}",
        "frames": 1,
        "height": 16 * (2 + 2 * (i % 2)),
        "width": 64,
        "tokens": 2,
        "captions": captions,
        "fps": None if i % 2 else 23.976,
        "crop": (0, i, 32, 64),
        "repeats": 1 + (i == 3),
    }
    return MediaRow(**(values | changes))


def bits(sample: Sample) -> dict[str, tuple[Any, ...]]:
    """Contents that are equal only if every bit is."""
    return {
        name: (x.dtype, tuple(x.shape), x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, x in sample.items()
    }


def add(writer: CacheWriter, samples: Iterable[int], captions: Iterable[str] = CAPTIONS) -> None:
    """Add what is not stored yet."""
    for caption in captions:
        if not writer.take_text(caption):
            writer.add_text(caption, text(caption))
    for i in samples:
        new = row(i)
        changing = {name: getattr(new, name) for name in ("source", "captions", "repeats", "weight", "use")}
        if not writer.take_media({"id": new.id, "source_hash": new.source_hash, **changing}):
            writer.add_media(new, media(i))


def write(folder: Path, samples: Iterable[int] = range(8), captions: Iterable[str] = CAPTIONS) -> CacheWriter:
    """Begin or continue a cache, and add what it does not have."""
    prepare_cache(folder, index())
    add(writer := CacheWriter(folder), samples, captions)
    return writer


def make(folder: Path, count: int = 8, ranks: int = 1) -> LatentCache:
    """Write a cache with all ranks, or complete it."""
    prepare_cache(folder, index())
    writers = [CacheWriter(folder) for _ in range(ranks)]
    for rank, writer in enumerate(writers):
        add(writer, range(rank, count, ranks), CAPTIONS[rank::ranks])
    writers[0].finish([row for writer in writers for row in writer.rows])
    return LatentCache(folder)


def check(cache: LatentCache, count: int) -> None:
    """Compare every sample and text with what was written."""
    assert [one.id for one in cache.rows] == [f"sample-{i:04d}" for i in range(count)]
    for i, stored in enumerate(cache.rows):
        assert row(i, tensors=stored.tensors) == stored
        for k in range(2):
            expected = {**media(i), **text(CAPTIONS[1 + (i + k) % 6])}
            assert bits(cache.sample(i, caption=k)) == bits(expected)
    for caption in {"", *(CAPTIONS[1 + (i + k) % 6] for i in range(count) for k in range(2))}:
        assert cache.caption(caption_hash(caption)) == caption
        assert bits(cache.text(caption_hash(caption))) == bits(text(caption))
    files = {path.name for path in cache.folder.iterdir() if not path.name.startswith(".tmp-")}  # of killed writers
    assert files == {"index.json", "contents.json", "media", "text"}
    cache.verify()
