"""Batches: equal in a context group, different between data groups, and with one group those of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from lightning_cp.data import GroupBatches
from lightning_cp.errors import DataError
from tests.dist.lightning_ranks import QUIET, STRATEGIES, fabric_of, present_rank, trainer_of
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
BY_PLAN = {"plans": {Plain: PLAIN_PLAN}, "check_peers": "off"}
COUNT = 12


class Numbered(Dataset[dict[str, Tensor]]):
    """Inputs with their index."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "x": torch.full((7, 16), index / COUNT)}


class Buckets:
    """A custom sampler with an order from Python's random numbers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return COUNT // 2

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[2 * i, 2 * i + 1] for i in range(COUNT // 2)]
        self.random.shuffle(batches)
        return iter(batches)


class Sees(LightningModule):
    """Trains, and keeps the indices of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = Plain()
        self.seen: list[list[int]] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.seen.append(batch["index"].tolist())
        return self.plain(batch["x"])[0].square().mean()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self(batch)
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.seen.append(batch["index"].tolist())

    def predict_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.seen.append(batch["index"].tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader(kind: str, seed: int = 0) -> DataLoader[Any]:
    data = Numbered()
    if kind == "buckets":
        return DataLoader(data, batch_sampler=Buckets(seed))  # type: ignore[arg-type]
    if kind == "generator":  # its sampler draws from it once more if it is asked for more than there is
        return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(11 + seed))
    return DataLoader(data, batch_size=2, shuffle=kind == "shuffled", drop_last=True)


def _seen_by_trainer(trainer: Trainer, loader: Any, seed: int) -> list[list[int]]:
    torch.manual_seed(9)
    module = Sees()
    torch.manual_seed(seed)
    trainer.fit(module, loader)
    return module.seen


def _seen_by_fabric(ours: Fabric, loader: Any, seed: int) -> list[list[int]]:
    torch.manual_seed(9)
    module = Sees()
    model = ours.setup_module(module)
    torch.manual_seed(seed)
    processed = ours.setup_dataloaders(loader)
    for _ in range(2):
        for batch in processed:
            ours.backward(model(batch))
    return module.seen


def _one_group(rank: int, world: int, flavour: str, kind: str, sharded: bool) -> tuple[list[Any], list[Any]]:
    """Two epochs in one process, then with ranks that have other random numbers than the first."""
    present_rank(rank, world)
    strategy = STRATEGIES[flavour, "cp_fsdp" if sharded else "cp"](ring=world, **BY_PLAN)
    if flavour == "trainer":
        alone = Trainer(accelerator="cpu", devices=1, strategy="auto", max_epochs=2, **QUIET)
        expected = _seen_by_trainer(alone, _loader(kind), 5)
        trainer = trainer_of(rank, world, strategy, max_epochs=2)
        return expected, _seen_by_trainer(trainer, _loader(kind, rank), 5 + rank)
    expected = _seen_by_fabric(Fabric(accelerator="cpu", devices=1), _loader(kind), 5)
    return expected, _seen_by_fabric(fabric_of(rank, world, strategy), _loader(kind, rank), 5 + rank)


@pytest.mark.parametrize(
    ("flavour", "kind", "world", "sharded"),
    [
        ("trainer", "shuffled", 3, True),
        ("trainer", "buckets", 2, True),
        ("fabric", "shuffled", 2, True),
        ("fabric", "generator", 3, False),
    ],
)
@pytest.mark.default(1)
def test_one_data_group_sees_the_batches_of_one_process(
    run_ranks: RankPool, flavour: str, kind: str, world: int, sharded: bool
) -> None:
    for expected, seen in run_ranks(world, _one_group, flavour, kind, sharded, init=False):
        assert len(expected) == 12
        assert seen == expected


def _several_groups(rank: int, world: int, ring: int) -> dict[str, Any]:
    def trainer() -> Trainer:
        return trainer_of(rank, world, STRATEGIES["trainer", "cp"](ring=ring, **BY_PLAN), max_epochs=1)

    module = Sees()
    trainer().predict(module, _loader("buckets", rank))
    return {"fit": _seen_by_trainer(trainer(), _loader("buckets", rank), rank), "predict": module.seen}


@pytest.mark.parametrize(("world", "ring"), [(3, 1), (4, 2)])
@pytest.mark.default(1)
def test_each_data_group_takes_its_share_of_a_users_batches(run_ranks: RankPool, world: int, ring: int) -> None:
    everyone = run_ranks(world, _several_groups, ring, init=False)
    assert all(everyone[rank] == everyone[rank - rank % ring] for rank in range(world))
    for stage in ("fit", "predict"):
        shares = [everyone[rank][stage] for rank in range(0, world, ring)]
        assert {len(share) for share in shares} == {COUNT // 2 * ring // world}
        assert sorted(batch for share in shares for batch in share) == [[2 * i, 2 * i + 1] for i in range(COUNT // 2)]


def _same_batches(rank: int, world: int, how: str) -> list[list[int]]:
    strategy = STRATEGIES["trainer", "cp"](ring=2, **BY_PLAN)
    trainer = trainer_of(rank, world, strategy, max_epochs=1, use_distributed_sampler=False)
    loader = _loader("in order" if how != "by random numbers" else "shuffled")
    if how == "marked":
        loader.dataset.sharded_by_data_rank = True  # type: ignore[attr-defined]
    module = Sees()
    if how == "validated":
        trainer.validate(module, loader, verbose=False)
        return module.seen
    if how == "divided":
        loader = DataLoader(Numbered(), batch_sampler=GroupBatches(Buckets(0), rank // 2, 2))  # type: ignore[arg-type]
    if how == "refused":
        with pytest.raises(DataError, match="all 2 data groups read the same batches: they begin with 0"):
            trainer.fit(module, loader)
        return []
    return _seen_by_trainer(trainer, loader, rank)


@pytest.mark.parametrize(
    ("how", "different"),
    [("refused", False), ("divided", True), ("marked", False), ("validated", False), ("by random numbers", True)],
)
@pytest.mark.default(2)
def test_groups_that_train_on_the_same_batches_are_refused(run_ranks: RankPool, how: str, different: bool) -> None:
    zero, one, two, three = run_ranks(4, _same_batches, how, init=False)
    assert (zero, two) == (one, three)
    assert (zero != two) == different
    assert len(zero) == (0 if how == "refused" else 3 if how == "divided" else 6)


def _same_in_fabric(rank: int, world: int) -> tuple[int, str, int]:
    """Batches without gradients, the error with them, and batches of a sampler for all ranks."""
    ours = fabric_of(rank, world, STRATEGIES["fabric", "cp"](ring=1, **BY_PLAN))
    loader = ours.setup_dataloaders(_loader("in order"), use_distributed_sampler=False)
    with torch.no_grad():
        evaluated = len(list(loader))
    with pytest.raises(DataError) as caught:
        next(iter(loader))
    for_all: Any = DataLoader(Numbered(), sampler=DistributedSampler(Numbered()))  # 3 replicas
    return evaluated, str(caught.value), len(list(ours.setup_dataloaders(for_all)))


def test_fabric_refuses_them_too(run_ranks: RankPool) -> None:
    for evaluated, said, divided in run_ranks(3, _same_in_fabric, init=False):
        assert (evaluated, divided) == (6, 4)
        assert "all 3 data groups read the same batches" in said


class _Fails(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        yield from (3, 1)
        raise LookupError("no sample 7")


def _failing(rank: int, world: int) -> list[int]:
    present_rank(rank, world)
    ours = fabric_of(rank, world, STRATEGIES["fabric", "cp"](ring=world))
    sampler = _Fails(Numbered()) if rank == 0 else RandomSampler(Numbered())  # type: ignore[arg-type]
    loader = iter(ours.setup_dataloaders(DataLoader(Numbered(), sampler=sampler)))
    seen = [int(next(loader)["index"]) for _ in range(2)]
    said = "a sampler failed on the first rank of its group: LookupError in _Fails: no sample 7"
    with pytest.raises(DataError, match=said):
        next(loader)
    return seen


def test_a_sampler_that_fails_fails_on_every_rank(run_ranks: RankPool) -> None:
    assert run_ranks(3, _failing, init=False) == [[3, 1]] * 3
