"""Batches of a custom sampler, divided over data groups."""

from __future__ import annotations

import pytest

from lightning_cp.data import GroupBatches


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
