"""`LatentData` pads masked text of a batch to the longest text, or to the lengths that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_cp.finetune import hold_out
from lightning_cp.latent_cache import (
    CacheWriter,
    LatentCache,
    LatentData,
    MediaRow,
    caption_hash,
    prepare_cache,
    text_lengths,
)
from tests.unit.finetune.latent_cache.made import index

TEXTS = {"": 1, "a": 3, "b": 4, "c": 9}  # captions and numbers of their positions


@pytest.fixture
def cache(tmp_path: Path) -> LatentCache:
    prepare_cache(tmp_path / "cache", index())
    writer = CacheWriter(tmp_path / "cache")
    for caption, length in TEXTS.items():
        writer.add_text(caption, {"prompt_embeds": torch.ones(length, 2)})
    for caption in list(TEXTS)[1:]:
        row = MediaRow(caption, f"{caption}.png", "0", 1, 32, 64, 2, (caption_hash(caption),))
        writer.add_media(row, {"latents": torch.zeros(4, 1, 4, 8), "latents_std": torch.ones(4, 1, 4, 8)})
    writer.finish()
    return LatentCache(writer.folder)


def _shapes(data: LatentData) -> list[int]:
    """Positions of each text alone in a batch with the empty caption."""
    found = []
    for item, length in enumerate(list(TEXTS.values())[1:]):
        batch = data.collate([data[item]])
        mask = batch["prompt_mask"]
        assert mask.sum() == length, "the mask marks the text"
        assert batch["prompt_embeds"].shape[1] == mask.shape[1]
        assert batch.empty is not None
        assert batch.empty["prompt_mask"].sum() == 1
        assert batch.empty["prompt_embeds"].shape[1] == mask.shape[1]
        found.append(mask.shape[1])
    return found


def test_without_lengths_text_is_padded_to_the_longest_of_the_batch(cache: LatentCache) -> None:
    assert _shapes(LatentData(cache)) == [3, 4, 9]


def test_lengths_bound_the_number_of_shapes(cache: LatentCache) -> None:
    assert _shapes(LatentData(cache, lengths=(4, 16))) == [4, 4, 16], "with a mask also where nothing is padded"
    assert _shapes(LatentData(cache, lengths=(16, 4))) == [4, 4, 16], "in any order"
    assert _shapes(LatentData(cache, lengths=[4])) == [4, 4, 9], "a text that is longer than all lengths is kept whole"


@pytest.mark.parametrize("lengths", [(0,), (4, -1), (4.0,), (True,), (513,)])
def test_a_wrong_length_is_refused(lengths: tuple[int, ...], cache: LatentCache) -> None:
    with pytest.raises(ValueError, match=r"lengths=\(.*\) must be integers from 1 to 512, the text length of qwen_im"):
        LatentData(cache, lengths=lengths)


def test_the_lengths_of_compiled_blocks_double_up_to_the_longest_text() -> None:
    assert text_lengths(512) == (64, 128, 256, 512)
    assert text_lengths(226) == (64, 128, 226)
    assert text_lengths(64) == (64,)
    assert text_lengths(1) == (1,)


def test_held_out_samples_are_not_trained_and_are_padded_alike(cache: LatentCache) -> None:
    data = LatentData(cache, repeats=2, lengths=(4, 16))
    training, held_out = hold_out(data, 1, seed=3)
    assert held_out is not None
    (row,) = held_out.rows
    assert sorted(data.row_of(item) for item in training.indices) == sorted([i for i in range(3) if i != row] * 2)
    assert training.buckets == [(1, 32, 64)] * 4
    for item in range(4):
        expected = data[training.indices[item], 1]
        assert training[item, 1].keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in training[item, 1].items())
    assert held_out.collate([held_out[0]])["prompt_embeds"].shape[1] in (4, 16)
    everything, nothing = hold_out(data, 0)
    assert (len(everything), nothing) == (6, None)
    with pytest.raises(ValueError, match="must be at least 1 and less than the number of sources, 3"):
        hold_out(data, 3)
