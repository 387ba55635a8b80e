"""Data groups with different numbers of batches: one error on all ranks before the step that would hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_cp.errors import DataError
from tests.dist.lightning_ranks import BY_PLAN, STRATEGIES, fabric_of, trainer_of
from tests.dist.plain import Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


class Sized(Dataset[Tensor]):
    sharded_by_data_rank = True

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2, 5, 16), float(index))


class Stream(IterableDataset[Tensor]):
    sharded_by_data_rank = True

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((2, 5, 16), float(i)) for i in range(self.count))


class Overstated(Stream):
    """A stream whose length is wrong."""

    def __len__(self) -> int:
        return 9


DATA: dict[str, Any] = {"sized": Sized, "stream": Stream, "overstated": Overstated}


class Module(LightningModule):
    def __init__(self, data: str, counts: list[int]) -> None:
        super().__init__()
        self.model, self.data, self.counts, self.steps = Plain(), data, counts, 0

    def loader(self) -> DataLoader[Tensor]:
        return DataLoader(DATA[self.data](self.counts[self.trainer.strategy.data_rank]), batch_size=None)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self.loader()

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self.loader()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.steps += 1
        loss: Tensor = self.model(batch)[0].square().mean()
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.steps += 1
        self.log("loss", self.model(batch)[0].mean(), sync_dist=True, batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _of_trainer(
    rank: int, world: int, kind: str, ring: int, what: str, data: str, counts: list[int], limit: int | None = None
) -> Any:
    """The error, or None, and the steps before it."""
    strategy = STRATEGIES["trainer", kind](ring=ring, **BY_PLAN)
    limits: dict[str, Any] = {"limit_val_batches": 0} if what == "fit" else {}
    trainer = trainer_of(rank, world, strategy, max_epochs=1, use_distributed_sampler=False, **limits)
    if limit is not None:
        trainer.limit_train_batches = limit
    module = Module(data, counts)
    try:
        getattr(trainer, what)(module)
    except DataError as error:
        return str(error), module.steps
    return None, module.steps


_LENGTHS = "the data loader has 2 batches on rank 0, but 3 on rank {}. All ranks must take the same number of steps"
_ENDED = "the data loader ended after 2 batches on rank 0, but rank {} has more. All ranks must take the same number"


# The Trainer reads one batch ahead of a stream.
@pytest.mark.parametrize(
    ("world", "ring", "kind", "what", "data", "error", "steps"),
    [
        (3, 1, "cp", "fit", "stream", _ENDED, 1),
        (4, 2, "cp", "fit", "sized", _LENGTHS, 0),
        (2, 1, "cp_fsdp", "validate", "sized", _LENGTHS, 0),
        (4, 2, "cp", "fit", "overstated", _ENDED, 2),
        (4, 2, "cp_fsdp", "validate", "stream", _ENDED, 1),
    ],
)
@pytest.mark.default(3)
def test_unequal_batches_are_an_error_on_all_ranks(
    run_ranks: RankPool, world: int, ring: int, kind: str, what: str, data: str, error: str, steps: int
) -> None:
    for found, taken in run_ranks(world, _of_trainer, kind, ring, what, data, [2, 3, 3]):
        assert found is not None
        assert found.startswith(error.format(ring))
        assert taken == steps


def test_equal_batches_train_and_whole_weights_may_be_evaluated_on_unequal_ones(run_ranks: RankPool) -> None:
    for data in ("sized", "stream"):
        assert run_ranks(2, _of_trainer, "cp", 1, "fit", data, [3, 3]) == [(None, 3)] * 2
    assert run_ranks(2, _of_trainer, "cp", 1, "validate", "sized", [2, 3]) == [(None, 2), (None, 3)]
    assert run_ranks(2, _of_trainer, "cp", 1, "fit", "sized", [2, 3], 2) == [(None, 2)] * 2


def _of_fabric(rank: int, world: int) -> list[str]:
    """Errors of two epochs, and of a generator of batches: that of the second rank ends earlier."""
    fabric = fabric_of(rank, world, STRATEGIES["fabric", "cp"](ring=world, **BY_PLAN))
    fabric.setup(Plain())
    loader = fabric.setup_dataloaders(DataLoader(Stream(3 - (rank == 1)), batch_size=None, num_workers=rank % 2))
    found = []
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            list(loader)
        found.append(str(caught.value))
    return found


def test_context_peers_with_unequal_streams_under_fabric(run_ranks: RankPool) -> None:
    found = run_ranks(3, _of_fabric)
    assert found[0] == found[1] == found[2]
    ended = "the data loader ended after 2 batches on rank 1, but rank 0 has more."
    assert all(one.startswith(ended) for one in found[0])


def _alone(rank: int, world: int) -> tuple[int, int, str]:
    """Batches of a sized loader that one rank reads alone, then of all ranks; an error with streams."""
    fabric = fabric_of(rank, world, STRATEGIES["fabric", "cp"](ring=1, **BY_PLAN))
    first, second = Sized(4), Sized(5)
    loaders: Any = fabric.setup_dataloaders(
        *(DataLoader(one, batch_size=None) for one in (first, second)), use_distributed_sampler=False
    )
    alone = sum(1 for _ in loaders[0]) if rank == 1 else 0
    first.count = 3  # on all ranks
    together = sum(1 for one in loaders for _ in one)
    streams: Any = fabric.setup_dataloaders(
        *(DataLoader(Stream(2), batch_size=None) for _ in range(2)), use_distributed_sampler=False
    )
    with pytest.raises(DataError) as caught:
        list(streams[int(rank == 1)])
    return alone, together, str(caught.value)


def test_one_rank_may_read_a_loader_with_a_length_alone_and_streams_are_told_apart(run_ranks: RankPool) -> None:
    for rank, (alone, together, error) in enumerate(run_ranks(3, _alone)):
        assert (alone, together) == (4 * (rank == 1), 8)
        assert error.startswith("rank 0 reads data loader ")
        assert ", but rank 1 data loader " in error
