"""Texts whose encoder sees the media: one for each caption and sample, stored once, and renewed with the media."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typing_extensions import override

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families import Media, Sample, TextStorage, register_family, registry
from lightning_cp.finetune.families.image.flux import FluxKontext
from lightning_cp.latent_cache import LatentCache, LatentData
from lightning_cp.objectives import objective_for
from tests.families.cases import made
from tests.unit.finetune.precompute.made import PICTURES, encoded, pictures, pipeline, pixels

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = {**PICTURES, "sizes": [[16, 24]], "max_upscale": 9}


class Seeing(FluxKontext):
    """Kontext with texts that contain the mean of the reference, which has half of the sample's size."""

    given: list[str] = []  # noqa: RUF012

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("padded", 512, others=("pooled_embeds", "mean"), sees_media=True)

    @override
    def reference_size(self, *, height: int, width: int) -> tuple[int, int]:
        return 16, 16

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        if media is None or "reference" not in media:
            raise FamilyError("a reference is needed")
        assert media["reference"].shape == (1, 3, 1, 16, 16)
        self.given.extend(captions)
        means = media["reference"].mean(dim=(1, 2, 3, 4))
        texts = super().encode_text(pipe, captions)
        return [{**text, "mean": mean[None]} for text, mean in zip(texts, means, strict=True)]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three pictures with one caption in common; the last one has no reference."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(Seeing, "given", [])
    register_family(Seeing)
    pipeline(tmp_path / "pipe", "flux_kontext")
    folder = pictures(tmp_path / "data", 3)
    for i in range(3):
        (folder / f"p{i}.txt").write_text("the same\n" + ("another\n" if i == 0 else ""))
    for i in range(2):
        Image.fromarray(pixels(20 + i, 40, 40)).save(folder / f"p{i}.reference.png")
    return folder


def run(data: Path) -> Any:
    return encoded(data.parent / "pipe", data, data.parent / "out", SETTINGS)


def test_each_sample_has_texts_of_its_own(data: Path) -> None:
    done = run(data)
    assert (done.found, done.encoded, [one.file.name for one in done.skipped]) == (3, 2, ["p2.png"])
    assert Seeing.given == ["the same", "another", "the same"]
    cache = LatentCache(data.parent / "out")
    first, second = (cache.sample(i)["mean"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(cache.sample(0, caption=1)["mean"], first)
    assert cache.caption(cache.rows[0].captions[1]) == "another"
    run(data)
    assert len(Seeing.given) == 3  # nothing is encoded twice


def test_captions_cannot_be_dropped(data: Path) -> None:
    run(data)
    latents = LatentData(LatentCache(data.parent / "out"))
    assert latents.cache.empty_text is None
    batch = latents.collate([latents[0], latents[1]])
    family = latents.cache.family()
    transformer = made("flux_kontext").transformer
    objective_for(family, seed=0).loss(transformer, family, batch, step=0, first_index=0)
    with pytest.raises(FamilyError, match="captions can only be dropped"):
        objective_for(family, seed=0, cond_dropout=0.9).loss(transformer, family, batch, step=0, first_index=0)


def test_a_changed_reference_is_encoded_again_with_its_texts(data: Path) -> None:
    run(data)
    Image.fromarray(pixels(50, 40, 40)).save(data / "p0.reference.png")
    done = run(data)
    assert (done.encoded, done.stored, done.changed) == (1, 1, 1)
    assert Seeing.given[3:] == ["the same", "another"]  # of the new reference: names of texts have its hash
    cache = LatentCache(data.parent / "out")
    assert not torch.equal(cache.sample(0)["mean"], cache.sample(1)["mean"])
    assert torch.equal(cache.sample(0)["mean"], cache.sample(0, caption=1)["mean"])
