"""Validation: every sample once at any number of data ranks, fixed noise and times, and a split that stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.families import ObjectiveDefaults, Sample, Stored, StoredBatch
from lightning_cp.finetune.validation import HeldOutData, Validation, ValidationResult, split_validation
from lightning_cp.objectives import FlowMatching
from lightning_cp.recipes.digits.family import LabelledClips
from lightning_cp.training.ranks import DataShard
from tests.unit.finetune.latent_cache.made import CAPTIONS, bits, make, media, text


class Clips(LabelledClips):
    """The family of recipes/train.py, with a VAE that has a distribution; only its mode may be used."""

    def __init__(self) -> None:
        super().__init__({"num_classes": 10})
        self.objective = ObjectiveDefaults(posterior="sample")  # type: ignore[misc]

    def clean(self, stored: Stored, noise: Tensor | None = None) -> Tensor:
        assert noise is None, "validation uses the mode"
        return super().clean(stored)


class Data:
    """Samples in memory, of as many sizes as `widths` has values. A batch has no empty caption: none is dropped."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.buckets = list(widths)

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, item: int) -> Sample:
        drawn = torch.Generator().manual_seed(item)
        return {"pixels": torch.randn(1, 3, 2, self.buckets[item], generator=drawn), "labels": torch.tensor(item % 10)}

    def collate(self, samples: Sequence[Sample]) -> StoredBatch:
        return StoredBatch({name: torch.stack([sample[name] for sample in samples]) for name in samples[0]})


class Model(nn.Module):
    """Multiplies by a number that depends on the time and the label; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5).eval()
        self.forwards, self.seen = 0, list[list[int]]()

    def forward(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.forwards += 1
        self.seen.append(labels.tolist())
        scale = (0.3 * times + 0.01 * labels).view(-1, 1, 1, 1, 1)
        return self.frozen(self.dropout(scale * noisy))  # type: ignore[no-any-return]


class OneRank:
    """The only rank, or one of several: the sums of the others are added to its sums."""

    device, global_rank, is_global_zero = torch.device("cpu"), 0, True

    def __init__(self, others: Sequence[Tensor] = ()) -> None:
        self.others, self.sums = others, torch.empty(0)

    def all_reduce(self, data: Any, *, reduce_op: str) -> Any:
        assert reduce_op == "sum"
        self.sums = data
        return sum(self.others, data)

    def broadcast(self, obj: Any) -> Any:
        return obj

    def barrier(self) -> None:
        pass


WIDTHS = (4, 2, 4, 4, 2, 6, 4)


def validation(widths: Sequence[int] = WIDTHS, **settings: Any) -> Validation:
    objective = FlowMatching(seed=5, cond_dropout=1.0)
    return Validation(Data(widths), Clips(), objective, **{"quantiles": (0.25, 0.5), **settings})


def on_ranks(size: int, one: Validation) -> tuple[ValidationResult, list[Model]]:
    """The result of several data ranks, run one after another, and the model of each."""
    sums, models = list[Tensor](), [Model() for _ in range(size)]
    for rank, model in enumerate(models):
        ranks = OneRank(sums)
        try:
            result = one.losses(model, ranks, DataShard(rank, size))
        except RuntimeError:
            assert rank < size - 1, "the last one has the sums of all"
        sums.append(ranks.sums)
    return result, models


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_every_sample_counts_once_at_any_number_of_ranks(size: int, batch_size: int) -> None:
    expected = validation().losses(Model(), OneRank(), DataShard(0, 1))
    found, models = on_ranks(size, validation(batch_size=batch_size))
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.by_quantile == pytest.approx(expected.by_quantile, rel=1e-6)
    assert len({model.forwards for model in models}) == 1, "a forward may contain collectives"
    assert {label for model in models for batch in model.seen for label in batch} == set(range(len(WIDTHS)))
    assert max(len(batch) for model in models for batch in model.seen) <= batch_size


def test_the_result_is_the_mean_of_the_samples_losses() -> None:
    """Computed here from the objective's own target, one sample at a time."""
    objective, family, data = FlowMatching(seed=5, sample_posterior=False), Clips(), Data((4, 4))
    found = validation((4, 4)).losses(Model(), OneRank(), DataShard(0, 1))
    assert found.samples == 2
    assert list(found.by_quantile) == [0.25, 0.5]
    for p, loss in found.by_quantile.items():
        sigma = {0.25: 1 / (1 + torch.tensor(0.6744898).exp()), 0.5: torch.tensor(0.5)}[p]
        losses = []
        for i in range(2):
            stored = data.collate([data[i]])
            step = -int(torch.tensor(p, dtype=torch.float64).view(torch.int64))
            noised = objective.noised(family, stored, step=step, first_index=i, times=sigma[None])
            noisy = (1 - sigma) * data[i]["pixels"] + sigma * (noised.target[0] + data[i]["pixels"])
            losses.append(((0.3 * sigma + 0.01 * i) * noisy - noised.target[0]).square().mean())
        assert loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert found.loss == pytest.approx(sum(found.by_quantile.values()) / 2)


def test_a_quantile_does_not_depend_on_the_others() -> None:
    three = validation(quantiles=(0.9, 0.5, 0.1)).losses(Model(), OneRank(), DataShard(0, 1))
    one = validation(quantiles=[0.5]).losses(Model(), OneRank(), DataShard(0, 1))
    assert one.by_quantile == {0.5: three.by_quantile[0.5]}
    assert len(set(three.by_quantile.values())) == 3


def test_modes_and_random_state_are_as_before() -> None:
    class Failing(Model):
        def forward(self, **_: Tensor) -> Tensor:
            raise KeyError("a mistake")

    before = torch.get_rng_state()
    for model in (Model(), Failing()):
        try:
            validation().losses(model, OneRank(), DataShard(0, 1))
        except KeyError:
            assert isinstance(model, Failing)
        assert [inner.training for inner in model.modules()] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), before)


def test_nan_is_reported() -> None:
    class Diverged(Model):
        def forward(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
            return torch.full_like(noisy, torch.nan)

    result = validation().losses(Diverged(), OneRank(), DataShard(0, 1))
    assert torch.tensor([result.loss, *result.by_quantile.values()]).isnan().all()


def test_ranks_with_different_sets_are_refused() -> None:
    ranks = OneRank([torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64)])
    with pytest.raises(RuntimeError, match=r"evaluated 9 validation samples, expected 7: all ranks must have the same"):
        validation().losses(Model(), ranks, DataShard(0, 1))


@pytest.mark.parametrize(
    ("widths", "settings", "message"),
    [
        ((), {}, "has no samples"),
        ((4,), {"quantiles": (0.0, 0.5)}, r"quantiles=\[0.0, 0.5\] must be"),
        ((4,), {"quantiles": (0.5, 0.5)}, "different"),
        ((4,), {"batch_size": 0}, "batch_size=0 must be at least 1"),
    ],
)
def test_bad_settings_are_refused(widths: Sequence[int], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validation(widths, **settings)


def test_held_out_rows_have_their_first_caption(tmp_path: Path) -> None:
    cache = make(tmp_path / "cache", count=6)
    data = HeldOutData(cache, [1, 3, 4])  # row 3 is repeated in training
    assert len(data) == 3
    assert data.buckets == [(1, 64, 64), (1, 64, 64), (1, 32, 64)]
    for item, row in enumerate((1, 3, 4)):
        assert bits(data[item]) == bits({**media(row), **text(CAPTIONS[1 + row])})
    stored = data.collate([data[0], data[1]])
    assert len(stored) == 2
    assert stored.empty is None


SOURCES = [f"clips/{i // 3}.mp4" for i in range(60)]  # three clips of each file


def held_out(sources: Sequence[str], count: int, seed: int = 0) -> set[str]:
    training, held = split_validation(sources, count, seed)
    assert sorted(training + held) == list(range(len(sources)))
    assert training == sorted(training)
    assert held == sorted(held)
    assert len(held) >= count
    files = {sources[i] for i in held}
    assert files.isdisjoint(sources[i] for i in training)
    return files


def test_all_clips_of_a_file_are_on_one_side() -> None:
    assert [len(held_out(SOURCES, count)) for count in (1, 3, 4, 19)] == [1, 1, 2, 7]
    assert held_out(SOURCES, 4) == held_out(SOURCES[::-1], 4)
    assert len({frozenset(held_out(SOURCES, 4, seed)) for seed in range(5)}) > 1


def test_added_files_move_no_training_file_to_the_validation_set() -> None:
    before = held_out(SOURCES, 12)
    moved = set[str]()
    for i in range(40):
        after = held_out([*SOURCES, f"added/{i}.mp4"], 12)
        assert after - before <= {f"added/{i}.mp4"}
        assert len(before - after) <= 1
        moved |= after - before
    assert 1 < len(moved) < 30, "some of the new files were held out"


@pytest.mark.parametrize("count", [0, 20, 60])
def test_a_split_without_training_files_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count={count} held-out samples must be at least 1 and less than .* 20"):
        split_validation(SOURCES, count, 0)
