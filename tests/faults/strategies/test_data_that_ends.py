"""Data that ends before training: an error on every rank, not a normal end of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import Dataset, IterableDataset

from lightning_cp.data import EndlessLoader
from lightning_cp.errors import DataError
from tests.e2e.recipe import SMALL, error_of, run


@pytest.mark.parametrize(
    ("settings", "share", "rank"),
    [("strategy=cp ring=3 trainer=lightning", 12, 0), ("strategy=cp_fsdp data_parallel=2 num_workers=1", 6, 0)],
)
@pytest.mark.full
def test_stop_iteration_of_a_data_set_is_an_error(settings: str, share: int, rank: int, tmp_path: Path) -> None:
    spoilt = ("data.dataset._target_=tests.faults.data.SpoiltDigits", "+data.dataset.fault=stop")
    third = (f"+data.dataset.after={2 * share}", f"+data.dataset.rank={rank}")
    finished = run(*SMALL, "max_steps=5", *spoilt, *third, *settings.split(), folder=tmp_path / "run", timeout_s=100)
    assert finished.exit_code == 1
    said = error_of(finished)
    assert said.startswith("error: the data loader ended after 2 batches of this run: StopIteration was raised in ")
    assert "data.py" in said
    assert "Trained" not in finished.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("data.dataset._target_=tests.faults.data.LyingDigits ring=2", "1697 samples on rank 1, but 1797 on rank 0"),
        ("data.dataset._target_=tests.faults.data.StreamedDigits", "must have __len__ and __getitem__"),
    ],
)
def test_a_data_set_that_cannot_be_ordered_is_refused(settings: str, said: str, tmp_path: Path) -> None:
    refused = run(*SMALL, "max_steps=5", "strategy=cp", *settings.split(), folder=tmp_path / "run")
    assert refused.exit_code == 1
    assert said in error_of(refused)


class Numbers(Dataset[int]):
    """Ten numbers; says that there are twenty."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return list(range(10))[index]


class RandomStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_sampler_or_stream_that_ends_early_is_an_error() -> None:
    given = []
    with pytest.raises(DataError, match="the data loader ended after 2 batches of this run"):
        given += [batch.tolist() for batch in EndlessLoader(Numbers(), batch_sampler=[[0, 1], [2, 3]])]
    with pytest.raises(DataError, match="the data loader ended after 3 batches of this run"):
        given += [batch.tolist() for batch in EndlessLoader(RandomStream(), batch_size=4)]
    assert given == []
    with pytest.raises(IndexError, match="out of range"):
        list(EndlessLoader(Numbers(), batch_size=4))
