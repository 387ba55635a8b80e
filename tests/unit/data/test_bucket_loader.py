"""Loaders over data of several sizes, and where a second iteration begins."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp.data import BucketBatchSampler, EndlessBatches, EndlessLoader, GlobalBatchSampler, bucket_loader
from lightning_cp.data.peer_batches import prepare_loader
from lightning_cp.data.sampler import UnsizedBatches
from tests.unit.data.test_peer_batches import _groups


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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_iteration_continues_after_the_returned_batches(workers: int) -> None:
    loader = bucket_loader(Pictures(), batch_size=4, num_workers=workers)
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
