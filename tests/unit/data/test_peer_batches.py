"""Loaders as the strategies prepare them, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_cp.data import GroupBatches
from lightning_cp.data.peer_batches import FirstRanksOrder, is_custom, prepare_loader, reordered
from lightning_cp.mesh.groups import MeshGroups

DATA: Any = list(range(8))


def _groups(data_rank: int, data_size: int) -> MeshGroups:
    settings: dict[str, Any] = dict.fromkeys(("mesh", "ring", "ulysses", "context"))
    return MeshGroups(
        name="", context_shape=(1, 1), context_rank=0, data_rank=data_rank, data_size=data_size, **settings
    )


def _backwards(order: Any) -> Any:
    return list(reversed(list(order)))


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 2},
        {"batch_size": None},
        {"sampler": range(8), "batch_size": 2},
        {"batch_sampler": [[0, 1], [2, 3], [4, 5], [6, 7]]},
    ],
)
def test_a_copy_has_another_order_and_the_loader_keeps_its_own(settings: dict[str, Any]) -> None:
    class Own(DataLoader[Any]):
        mark = 3

    loader = Own(DATA, collate_fn=list if settings.get("batch_size", 2) else None, **settings)
    before = [list(batch) if isinstance(batch, list) else batch for batch in loader]
    other = reordered(loader, _backwards)
    flat = [x for batch in other for x in (batch if isinstance(batch, list) else [batch])]
    assert sorted(flat) == DATA
    assert flat[:2] in ([7, 6], [6, 7])
    assert list(loader) == before
    assert isinstance(other, Own)


@pytest.mark.parametrize("shuffle", [True, False])
def test_one_process_keeps_its_loader(shuffle: bool) -> None:
    for loader in (DataLoader(DATA, shuffle=shuffle), DataLoader(DATA, batch_sampler=Buckets(3))):  # type: ignore[arg-type]
        assert prepare_loader(loader, _groups(0, 1), divide=True) is loader


def test_only_batch_samplers_without_a_sampler_are_foreign() -> None:
    assert is_custom(Buckets(3))
    assert not is_custom(None)
    assert not is_custom(BatchSampler(SequentialSampler(DATA), 2, drop_last=False))
    assert not is_custom(type("Grouped", (BatchSampler,), {})(RandomSampler(DATA), 2, False))


def test_a_distributed_sampler_for_all_ranks_is_refused() -> None:
    sampler: Any = DistributedSampler(DATA, num_replicas=4, rank=1)
    loader = DataLoader(DATA, sampler=sampler)
    with pytest.raises(ValueError, match=r"num_replicas=4, rank=1.*num_replicas=strategy.data_size \(2\)"):
        prepare_loader(loader, _groups(1, 2), divide=True)
    assert prepare_loader(loader, _groups(1, 4), divide=True) is loader


def test_alone_an_order_stays_and_keeps_its_methods() -> None:
    order = FirstRanksOrder(Buckets(3), None)
    order.set_epoch(1)
    assert (list(order), len(order)) == ([[10], [11], [12]], 3)


class Buckets:
    """Batches of samples of one size; no `BatchSampler` of torch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([[10 * self.epoch + i] for i in range(self.count)])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 6, 7])
def test_groups_take_equally_many_batches_and_leave_none_out(size: int, count: int) -> None:
    shares = [list(GroupBatches(Buckets(count), rank, size)) for rank in range(size)]
    lengths = [len(GroupBatches(Buckets(count), rank, size)) for rank in range(size)]
    assert [len(share) for share in shares] == lengths == [-(-count // size)] * size
    taken = [batch for together in zip(*shares) for batch in together]
    assert taken[:count] == list(Buckets(count))
    assert all(batch in taken[:count] for batch in taken)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_repetition_each_batch_is_taken_once(size: int) -> None:
    groups = [GroupBatches(Buckets(7), rank, size, repeat=False) for rank in range(size)]
    assert sorted(batch for group in groups for batch in group) == list(Buckets(7))
    assert [len(group) for group in groups] == [len(list(group)) for group in groups]


def test_the_epoch_reaches_the_sampler_inside() -> None:
    group = GroupBatches(Buckets(2), 1, 2)
    group.set_epoch(3)
    assert list(group) == [[31]]
    with pytest.raises(AttributeError, match="batch_size"):
        group.batch_size


def test_a_data_rank_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="data_rank=2 must be from 0 to data_size - 1"):
        GroupBatches(Buckets(2), 2, 2)
