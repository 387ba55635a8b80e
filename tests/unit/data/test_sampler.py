import hashlib
from itertools import chain, islice

import pytest
import torch

from lightning_cp.data import EndlessBatches, GlobalBatchSampler


def global_batches(data_size: int, **settings: object) -> list[list[int]]:
    ranks = [
        list(GlobalBatchSampler(23, 6, data_rank=rank, data_size=data_size, **settings)) for rank in range(data_size)
    ]
    return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("data_size", [1, 2, 3, 6])
def test_every_data_parallelism_sees_the_same_global_batches_in_order(data_size: int) -> None:
    assert global_batches(data_size, seed=5) == global_batches(1, seed=5)


def test_an_epoch_has_no_sample_twice_and_drops_the_partial_batch() -> None:
    batches = global_batches(3)
    seen = list(chain(*batches))
    assert len(batches) == len(GlobalBatchSampler(23, 6)) == 3
    assert len(set(seen)) == len(seen) == 18


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    sampler = GlobalBatchSampler(50, 10, seed=1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(GlobalBatchSampler(50, 10, seed=2)) != first


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert global_batches(2, shuffle=False)[0] == [0, 1, 2, 3, 4, 5]


def test_a_saved_position_continues_exactly_at_another_data_parallelism() -> None:
    whole = GlobalBatchSampler(23, 6, seed=3)
    whole.set_epoch(4)
    expected = list(whole)
    sampler = GlobalBatchSampler(23, 6, seed=3, data_rank=1, data_size=2)
    sampler.set_epoch(4)
    batches = iter(sampler)
    next(batches)
    state = sampler.state_dict()
    resumed = GlobalBatchSampler(23, 6, seed=3, data_rank=2, data_size=3)
    resumed.load_state_dict(state)
    assert resumed.epoch == 4
    assert list(resumed) == [batch[4:6] for batch in expected[1:]]


def test_the_position_can_be_given_in_steps_for_workers_that_prefetch() -> None:
    sampler = GlobalBatchSampler(23, 6)
    resumed = GlobalBatchSampler(23, 6)
    resumed.load_state_dict(sampler.state_dict(step=3 * 2 + 2))
    sampler.set_epoch(2)
    assert list(resumed) == list(sampler)[2:]
    assert resumed.state_dict()["step"] == 9


def test_it_drives_a_loader_with_workers() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(23))
    loader = torch.utils.data.DataLoader(data, batch_sampler=GlobalBatchSampler(23, 6, data_rank=1, data_size=2))
    assert [batch[0].tolist() for batch in loader] == list(GlobalBatchSampler(23, 6, data_rank=1, data_size=2))


def test_endless_batches_go_on_through_epochs_from_where_the_sampler_stands() -> None:
    def endless(start: int) -> list[list[int]]:
        sampler = GlobalBatchSampler(23, 6)
        sampler.seek(start)
        return list(islice(EndlessBatches(sampler), 11 - start))

    first = [batch for epoch in range(4) for batch in _epoch(epoch)]
    assert endless(0) == first[:11]
    for start in (2, 3, 7):
        assert endless(start) == first[start:11]


def _epoch(epoch: int) -> list[list[int]]:
    sampler = GlobalBatchSampler(23, 6)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_first_index_is_where_the_slice_begins() -> None:
    assert [GlobalBatchSampler(23, 6, data_rank=rank, data_size=3).first_index for rank in range(3)] == [0, 2, 4]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_samples": 5, "batch_size": 6}, "batch_size=6.*5 samples"),
        ({"num_samples": 5, "batch_size": 0}, "batch_size=0"),
        ({"num_samples": 9, "batch_size": 4, "data_size": 3}, "batch_size=4.*multiple of data_parallel=3"),
        ({"num_samples": 9, "batch_size": 4, "data_rank": 2, "data_size": 2}, "data_rank=2"),
        ({"num_samples": 9, "batch_size": 4, "data_size": 0}, "data_size=0"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GlobalBatchSampler(**settings)


@pytest.mark.parametrize("changed", [{"seed": 1}, {"batch_size": 5}, {"num_samples": 24}, {"shuffle": False}])
def test_another_order_is_not_continued(changed: dict[str, int]) -> None:
    state = GlobalBatchSampler(23, 6).state_dict()
    settings = {"num_samples": 23, "batch_size": 6} | changed
    with pytest.raises(ValueError, match=next(iter(changed))):
        GlobalBatchSampler(**settings).load_state_dict(state)


def test_the_order_has_not_changed() -> None:
    sampler = GlobalBatchSampler(23, 6, seed=5, data_rank=1, data_size=2)
    sampler.set_epoch(3)
    assert list(sampler) == [[14, 5, 11], [1, 0, 6], [22, 18, 16]]
    large = GlobalBatchSampler(100_003, 8, seed=11)
    large.seek(5 * len(large) + 3)
    assert hashlib.blake2b(repr(list(large)).encode(), digest_size=8).hexdigest() == "aea776816b502fdb"
