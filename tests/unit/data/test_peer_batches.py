"""Loaders as the strategies prepare them, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_cp.data.peer_batches import FirstRanksOrder, is_custom, prepare_loader, reordered
from lightning_cp.mesh.groups import MeshGroups
from tests.unit.data.test_group_batches import Buckets

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
