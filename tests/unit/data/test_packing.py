"""Rows of several samples: their tokens, documents and lengths, and samples that do not fit."""

from __future__ import annotations

import pickle
import re
from typing import Any

import diffusers
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from lightning_cp.data import PackedBatches, PackedCollate
from lightning_cp.errors import PlanError, ShapeError

TOKENS = {"image": ["latents", "ids"], "text": ["prompt"]}


def _sample(image: int, text: int, **others: Any) -> dict[str, Any]:
    latents = torch.arange(3.0 * image).view(image, 3)
    sample = {"latents": latents, "ids": torch.arange(image), "prompt": torch.full((text, 2), float(text))}
    return {**sample, "time": torch.tensor(image / 10), "label": image, **others}


def test_a_row_holds_the_tokens_of_all_samples_with_their_documents() -> None:
    samples = [_sample(4, 2), _sample(1, 3)]
    row = PackedCollate(TOKENS, max_tokens=10)(samples)
    for name in ("latents", "ids", "prompt"):
        assert row[name].equal(torch.cat([x[name] for x in samples])[None])
    assert row["image_documents"].tolist() == [[0, 0, 0, 0, 1]]
    assert row["text_documents"].tolist() == [[0, 0, 1, 1, 1]]
    assert (row["image_lengths"].tolist(), row["text_lengths"].tolist()) == ([4, 1], [2, 3])
    assert row["label"].tolist() == [4, 1]
    assert row["time"][row["image_documents"]].equal(torch.tensor([[0.4, 0.4, 0.4, 0.4, 0.1]]))
    added = {f"{modality}_{kind}" for modality in TOKENS for kind in ("documents", "lengths")}
    assert row.keys() == samples[0].keys() | added


def test_dims_name_the_values_to_shard() -> None:
    collate = PackedCollate(TOKENS)
    assert collate.dims("image") == {"latents": 1, "ids": 1, "image_documents": 1}
    assert collate.dims() == {**collate.dims("image"), "prompt": 1, "text_documents": 1}
    with pytest.raises(ValueError, match="'sound' is none of the modalities"):
        collate.dims("sound")


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least one sample"),
        ([_sample(2, 1), _sample(0, 1)], "sample 1 of a row have {'latents': 0, 'ids': 0}"),
        ([_sample(2, 0)], "the values of 'text' in sample 0"),
        ([_sample(2, 1, ids=torch.arange(3))], "{'latents': 2, 'ids': 3} tokens"),
        ([_sample(2, 1), _sample(2, 1, latents=torch.zeros(2, 4))], re.escape("[2, 4] of torch.float32 in sample 1")),
        ([_sample(2, 1), _sample(2, 1, ids=torch.zeros(2))], "'ids' is .* of torch.int64 .* of torch.float32"),
        ([_sample(2, 1, ids=torch.tensor(2))], "'ids' of sample 0 of a row is a scalar tensor"),
        ([_sample(2, 1, ids=[0, 1])], "'ids' of sample 0 of a row is a list"),
        ([{"latents": torch.zeros(2, 3), "ids": torch.arange(2)}], "sample 0 of a row has no 'prompt'"),
        ([_sample(2, 1), _sample(2, 1, mask=1)], "must have the same names"),
        ([_sample(2, 1, image_lengths=2)], "'image_lengths' in a sample is a name that PackedCollate adds"),
        ([_sample(5, 2), _sample(3, 2)], "2 samples have 12 tokens together, more than max_tokens=11"),
    ],
)
def test_samples_that_do_not_fit_are_refused(samples: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedCollate(TOKENS, max_tokens=11)(samples)


@pytest.mark.parametrize("tokens", [{}, {"image": []}, {"image": "ids"}, {"image": ["ids"], "text": ["ids"]}])
def test_tokens_must_name_each_value_once(tokens: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least one name for each modality"):
        PackedCollate(tokens)


def test_max_tokens_is_positive() -> None:
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        PackedCollate(TOKENS, max_tokens=0)


def test_only_models_with_a_time_for_each_token_get_rows_of_several_samples() -> None:
    kept = PackedCollate({"image": ["hidden_states"]}, model=diffusers.Ideogram4Transformer2DModel)
    assert pickle.loads(pickle.dumps(kept)) == kept
    for kind in (diffusers.FluxTransformer2DModel, diffusers.WanTransformer3DModel, torch.nn.Linear):
        with pytest.raises(PlanError, match=f"model={kind.__name__} cannot get several.* are Ideogram4Transformer2DM"):
            PackedCollate({"image": ["hidden_states"]}, model=kind)


LENGTHS = [5, 3, 4, 9, 1, 1, 6]


def test_rows_keep_the_order_and_the_limit() -> None:
    assert list(PackedBatches(LENGTHS, 9)) == [[0, 1], [2], [3], [4, 5, 6]]
    assert list(PackedBatches(LENGTHS, 9, [6, 4, 5, 3])) == [[6, 4, 5], [3]]
    assert list(PackedBatches(LENGTHS, 100)) == [[*range(7)]]
    assert list(PackedBatches([], 9)) == []


def test_each_epoch_draws_new_rows_with_every_sample_once() -> None:
    order = RandomSampler(LENGTHS, generator=torch.Generator().manual_seed(0))
    collate = PackedCollate({"image": ["x"]}, max_tokens=9)
    samples: Any = [{"x": torch.full((length,), index)} for index, length in enumerate(LENGTHS)]
    loader = DataLoader(samples, batch_sampler=PackedBatches(LENGTHS, 9, order), collate_fn=collate)  # type: ignore[arg-type]
    epochs = [torch.cat([row["x"][0] for row in loader]) for _ in range(2)]
    for epoch in epochs:
        assert epoch.bincount().tolist() == LENGTHS
    assert not epochs[0].equal(epochs[1])


@pytest.mark.parametrize("length", [0, 10])
def test_a_sample_that_fits_in_no_row_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"sample 1 has {length} tokens: it must have 1 to max_tokens=9"):
        PackedBatches([5, length], 9)


def test_errors_of_shapes_are_shape_errors() -> None:
    with pytest.raises(ShapeError):
        PackedCollate(TOKENS)([_sample(2, 0)])


def test_an_order_that_can_be_read_only_once_raises() -> None:
    with pytest.raises(ValueError, match="order is a list_iterator, which can be read only once"):
        PackedBatches([3, 4], 9, iter([0, 1]))
