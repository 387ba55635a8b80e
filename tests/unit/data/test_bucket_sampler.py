"""Batches of one bucket each: which samples, how often, in which order, and from where a run continues."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp.data import (
    BucketBatchSampler,
    EndlessBatches,
    EndlessLoader,
    GlobalBatchSampler,
    RandomStream,
    bucket_loader,
    keyed_generator,
)
from lightning_cp.data.peer_batches import prepare_loader
from lightning_cp.data.sampler import UnsizedBatches
from tests.unit.data.test_peer_batches import _groups

SIZES = {"wide": 11, "tall": 7, "square": 8, "tiny": 2}
KEYS = [key for key, count in SIZES.items() for _ in range(count)]
np.random.default_rng(0).shuffle(KEYS)
NO_TINY = [key for key in KEYS if key != "tiny"]


def epoch_of(sampler: BucketBatchSampler, epoch: int) -> list[Any]:
    sampler.set_epoch(epoch)
    return list(sampler)


def whole(keys: list[str], epochs: int, **settings: Any) -> list[Any]:
    """The global batches of the first epochs."""
    sampler = BucketBatchSampler(keys, 4, **settings)
    return [batch for epoch in range(epochs) for batch in epoch_of(sampler, epoch)]


def test_a_batch_is_full_and_has_one_bucket() -> None:
    for batch in (one for leftovers in ("carry", "drop", "repeat") for one in whole(NO_TINY, 5, leftovers=leftovers)):
        assert len(batch) == 4
        assert len({NO_TINY[index] for index in batch}) == 1


@pytest.mark.parametrize(("epochs", "batch_size"), [(1, 4), (6, 4), (9, 5), (40, 3), (5, 11)])
def test_carry_sees_every_sample_equally_often(epochs: int, batch_size: int) -> None:
    sampler = BucketBatchSampler(KEYS, batch_size, seed=1)
    seen = Counter(chain.from_iterable(chain.from_iterable(epoch_of(sampler, epoch) for epoch in range(epochs))))
    for index, key in enumerate(KEYS):
        most = max(seen[other] for other, same in enumerate(KEYS) if same == key)
        assert most - 1 <= seen[index] <= most
        if SIZES[key] >= batch_size:
            assert epochs - 1 <= seen[index] <= epochs
    for key, count in SIZES.items():  # less than one batch of a bucket is still to come
        taken = sum(seen[index] for index, same in enumerate(KEYS) if same == key)
        assert 0 <= epochs * count - taken < batch_size


def test_carry_joins_the_permutations_of_the_epochs() -> None:
    sampler = BucketBatchSampler(NO_TINY, 4, seed=9, with_epoch=True)
    batches = [batch for epoch in range(7) for batch in epoch_of(sampler, epoch)]
    for number, name in enumerate(dict.fromkeys(NO_TINY)):
        members = [index for index, key in enumerate(NO_TINY) if key == name]
        count = len(members)
        sequence = [
            (members[i], epoch)
            for epoch in range(7)
            for i in keyed_generator(9, RandomStream.ORDER, step=epoch, index=number).permutation(count)
        ]
        cut = [sequence[start : start + 4] for start in range(0, 7 * count - 3, 4)]
        assert sorted(cut) == sorted(batch for batch in batches if NO_TINY[batch[0][0]] == name)


def test_pairs_have_the_epoch_from_which_a_sample_is_left() -> None:
    sampler = BucketBatchSampler(["a"] * 5, 4, shuffle=False, with_epoch=True)
    assert epoch_of(sampler, 0) == [[(0, 0), (1, 0), (2, 0), (3, 0)]]
    assert epoch_of(sampler, 1) == [[(4, 0), (0, 1), (1, 1), (2, 1)]]
    assert epoch_of(sampler, 3) == [[(2, 2), (3, 2), (4, 2), (0, 3)], [(1, 3), (2, 3), (3, 3), (4, 3)]]


def test_drop_leaves_the_rest_of_each_epoch_out() -> None:
    sampler = BucketBatchSampler(NO_TINY, 4, leftovers="drop", with_epoch=True)
    for epoch in range(3):
        pairs = list(chain.from_iterable(epoch_of(sampler, epoch)))
        assert len(set(pairs)) == len(pairs) == 4 * len(sampler) == 4 * (11 // 4 + 7 // 4 + 8 // 4)
        assert {e for _, e in pairs} == {epoch}


def test_repeat_fills_the_last_batch_with_the_first_samples_of_the_epoch() -> None:
    sampler = BucketBatchSampler(["a"] * 6 + ["b"], 4, leftovers="repeat", shuffle=False)
    for epoch in range(2):
        assert epoch_of(sampler, epoch) == [[0, 1, 2, 3], [4, 5, 0, 1], [6, 6, 6, 6]]
    shuffled = BucketBatchSampler(["a"] * 6, 4, leftovers="repeat", with_epoch=True)
    for epoch in range(3):
        pairs = list(chain.from_iterable(epoch_of(shuffled, epoch)))
        assert pairs[6:] == pairs[:2]
        assert {e for _, e in pairs} == {epoch}
    seen = Counter(chain.from_iterable(whole(KEYS, 1, leftovers="repeat")))
    assert set(seen) == set(range(len(KEYS)))


@pytest.mark.parametrize("leftovers", ["carry", "repeat"])
@pytest.mark.parametrize("data_size", [2, 4])
def test_every_data_parallelism_sees_the_same_global_batches(leftovers: str, data_size: int) -> None:
    expected = whole(KEYS, 4, leftovers=leftovers, with_epoch=True)
    ranks = [
        whole(KEYS, 4, leftovers=leftovers, with_epoch=True, data_rank=rank, data_size=data_size)
        for rank in range(data_size)
    ]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == expected


def test_the_order_is_a_function_of_seed_and_epoch_and_mixes_the_buckets() -> None:
    keys = ["a"] * 40 + ["b"] * 40
    sampler = BucketBatchSampler(keys, 4, seed=1)
    first = epoch_of(sampler, 0)
    second = epoch_of(sampler, 1)
    orders = ["".join(keys[batch[0]] for batch in epoch) for epoch in (first, second)]
    assert orders[0] != orders[1]
    assert all("ab" in order and "ba" in order for order in orders)
    assert epoch_of(sampler, 0) == first == list(sampler) != epoch_of(BucketBatchSampler(keys, 4, seed=2), 0)


@pytest.mark.parametrize("leftovers", ["carry", "drop", "repeat"])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_every_step_is_found_without_going_through_the_earlier_ones(leftovers: str, batch_size: int) -> None:
    keys = NO_TINY if leftovers == "drop" else KEYS
    sampler = BucketBatchSampler(keys, batch_size, leftovers=leftovers, seed=4)
    steps = [(epoch, batch) for epoch in range(7) for batch in epoch_of(sampler, epoch)]
    for step, (epoch, batch) in enumerate(steps):
        sampler.seek(step)
        assert (sampler.epoch, next(iter(sampler))) == (epoch, batch)
        assert sampler.state_dict()["step"] == step + 1


def test_a_far_step_is_reached_at_once() -> None:
    sampler = BucketBatchSampler(KEYS, 4)
    step = 10**12
    sampler.seek(step)
    before = sampler.order.batches_before(sampler.epoch)
    assert before <= step < before + len(sampler)
    assert len(list(sampler)) == before + len(sampler) - step


def test_an_epoch_may_have_no_batch() -> None:
    sampler = BucketBatchSampler(["a", "b"] * 3, 4, seed=2)  # 3 of each
    assert [len(epoch_of(sampler, epoch)) for epoch in range(5)] == [0, 2, 2, 2, 0]
    sampler.seek(0)
    assert sampler.epoch == 1
    endless = islice(EndlessBatches(BucketBatchSampler(["a", "b"] * 3, 4, seed=2)), 6)
    assert list(endless) == [batch for epoch in range(4) for batch in epoch_of(sampler, epoch)]


def test_a_saved_position_continues_at_another_data_parallelism() -> None:
    expected = whole(KEYS, 6, seed=5)
    sampler = BucketBatchSampler(KEYS, 4, seed=5, data_rank=1, data_size=2)
    sampler.seek(9)
    next(iter(sampler))
    ranks = [BucketBatchSampler(KEYS, 4, seed=5, data_rank=rank, data_size=4) for rank in range(4)]
    for rank in ranks:
        rank.load_state_dict(sampler.state_dict())
    parts = zip(*(islice(EndlessBatches(rank), 20) for rank in ranks), strict=True)
    assert [list(chain(*part)) for part in parts] == expected[10:30]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 1}, "seed=1"),
        ({"batch_size": 2}, "batch_size=2"),
        ({"leftovers": "repeat"}, "leftovers=repeat"),
        ({"buckets": KEYS[1:] + KEYS[:1]}, "assignment="),
    ],
)
def test_another_order_is_not_continued(changed: dict[str, Any], named: str) -> None:
    state = BucketBatchSampler(KEYS, 4).state_dict()
    with pytest.raises(ValueError, match=f"{named}.*differs from the checkpoint"):
        BucketBatchSampler(**({"buckets": KEYS, "batch_size": 4} | changed)).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"leftovers": "keep"}, "leftovers='keep' must be one of 'carry', 'drop', 'repeat'"),
        ({"leftovers": "drop"}, r"batch_size=4: tiny \(2 samples\). Lower batch_size"),
        ({"batch_size": 29}, "batch_size=29 must be at most the 28 samples"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"buckets": [], "leftovers": "repeat"}, "the number of samples, 0"),
        ({"data_size": 3}, "batch_size=4 .* multiple of data_parallel=3"),
        ({"data_rank": 2, "data_size": 2}, "data_rank=2"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BucketBatchSampler(**({"buckets": KEYS, "batch_size": 4} | settings))


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        BucketBatchSampler(KEYS, 4).seek(-1)


def test_the_report_says_what_happens_to_leftovers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.fabric.bucket_batches"):
        sampler = BucketBatchSampler(KEYS, 4)
        BucketBatchSampler(KEYS, 4, data_rank=1, data_size=2)
    info, warning = caplog.records  # of the first rank only
    assert info.getMessage() == sampler.report()
    assert f"28 samples, {len(sampler)} batches of 4 in epoch 0, by size:" in sampler.report()
    assert "bucket wide: 11 samples, 2.75 batches; the last 3 of an epoch go into a batch of the next" in info.message
    assert "bucket square: 8 samples, 2 batches\n" in info.message
    assert warning.levelno == logging.WARNING
    assert "buckets with fewer samples than a batch of 4: tiny (2 samples)." in warning.getMessage()
    assert "last 3 of each epoch are dropped" in BucketBatchSampler(NO_TINY, 4, leftovers="drop").report()
    assert "last 3 are completed with 1 others" in BucketBatchSampler(KEYS, 4, leftovers="repeat").report()
    assert "8 more buckets: 8 samples" in BucketBatchSampler(range(40), 4).report()


class Pictures:
    """Pictures of three widths: 5, 6 and 7 of them."""

    def __init__(self) -> None:
        self.buckets = [width for width, count in ((8, 5), (16, 6), (24, 7)) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, index: int | tuple[int, int]) -> Tensor:
        number, epoch = index if isinstance(index, tuple) else (index, 0)
        return torch.full((self.buckets[number],), 100 * epoch + number)

    def collate(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples)


def _numbers(batches: Any, count: int | None = None) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in islice(batches, count)]


def _expected(count: int, **settings: Any) -> list[list[int]]:
    return list(islice(EndlessBatches(BucketBatchSampler(Pictures().buckets, 4, **settings)), count))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_endless_loader_yields_batches_of_one_size_from_any_step(workers: int) -> None:
    loader = bucket_loader(Pictures(), batch_size=4, seed=3, start_step=7, num_workers=workers)
    assert type(loader) is EndlessLoader
    assert _numbers(loader, 20) == _expected(27, seed=3)[7:]


def test_a_rank_loads_its_share() -> None:
    ranks = SimpleNamespace(data_rank=1, data_size=2)
    loader = bucket_loader(Pictures(), batch_size=4, ranks=ranks)
    assert _numbers(loader, 9) == [batch[2:] for batch in _expected(9)]


def test_the_data_set_gets_the_epoch() -> None:
    loader = bucket_loader(Pictures(), batch_size=4, with_epoch=True)
    assert _numbers(loader, 30) == [[100 * e + i for i, e in batch] for batch in _expected(30, with_epoch=True)]


def test_a_loader_of_epochs_has_a_length_only_if_it_is_fixed() -> None:
    carry = bucket_loader(Pictures(), batch_size=4, endless=False)
    with pytest.raises(TypeError, match="no fixed length"):
        len(carry)
    assert len(_numbers(carry)) == 3
    dropping = bucket_loader(Pictures(), batch_size=4, endless=False, leftovers="drop")
    assert len(dropping) == len(_numbers(dropping)) == 3


def test_a_second_iteration_continues_after_the_returned_batches() -> None:
    loader = bucket_loader(Pictures(), batch_size=4, num_workers=2)
    assert _numbers(loader, 6) + _numbers(loader, 5) + _numbers(loader, 9) == _expected(20)
    loader.batch_sampler.order_sampler.seek(2)  # type: ignore[union-attr]
    assert _numbers(loader, 3) == _expected(5)[2:]


def test_data_without_buckets_are_refused() -> None:
    short = Pictures()
    short.buckets = short.buckets[1:]
    short.__class__ = type("Short", (Pictures,), {"__len__": lambda _: 18})
    with pytest.raises(ValueError, match=r"Short\.buckets has 17 keys for 18 samples"):
        bucket_loader(short, batch_size=4)
    with pytest.raises(TypeError, match="list must have an attribute `buckets`: the key of each sample"):
        bucket_loader([1, 2, 3], batch_size=4)  # type: ignore[arg-type]


def test_a_strategy_without_data_ranks_is_refused() -> None:
    with pytest.raises(TypeError, match="ranks=object must have `data_rank` and `data_size`"):
        bucket_loader(Pictures(), batch_size=4, ranks=object())  # type: ignore[arg-type]


def test_the_strategies_hide_a_length_that_changes() -> None:
    for data_size in (1, 2):
        groups = _groups(0, data_size)
        sampler = BucketBatchSampler(Pictures().buckets, 4, data_size=data_size)
        prepared = prepare_loader(DataLoader(Pictures(), batch_sampler=sampler), groups, divide=True)  # type: ignore[arg-type]
        assert isinstance(prepared.batch_sampler, UnsizedBatches)
        assert prepare_loader(prepared, groups, divide=True) is prepared
        assert _numbers(prepared) == list(sampler)
        for fixed in (
            BucketBatchSampler(Pictures().buckets, 4, leftovers="repeat", data_size=data_size),
            GlobalBatchSampler(18, 4, data_size=data_size),
        ):
            loader: Any = DataLoader(Pictures(), batch_sampler=fixed)  # type: ignore[arg-type]
            assert prepare_loader(loader, groups, divide=True) is loader


def test_announced_epochs_are_entered_and_a_position_set_by_the_user_is_kept() -> None:
    sampler = BucketBatchSampler(Pictures().buckets, 4)
    announced = []
    for epoch in range(3):
        sampler.sampler.set_epoch(epoch)
        announced.append(sampler.epoch)
    sampler.seek(20)
    at = sampler.epoch
    for epoch in (0, 1, 2):  # Fabric counts the iterations over a loader
        sampler.sampler.set_epoch(epoch)
        announced.append(sampler.epoch)
        if epoch == 0:
            assert next(iter(sampler)) == _expected(21)[20]
    assert announced == [0, 1, 2, at, at + 1, at + 2]
    assert at == 4
