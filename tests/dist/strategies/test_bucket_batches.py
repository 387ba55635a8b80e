"""Batches of one bucket each: equal on context peers, and slices of one global batch on data groups."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp.data import BucketBatchSampler, EndlessBatches, bucket_loader
from tests.dist.lightning_ranks import STRATEGIES, fabric_of, trainer_of
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
BY_PLAN: dict[str, Any] = {"plans": {Plain: PLAIN_PLAN}, "check_peers": "always"}
BATCH, SEED = 12, 4


class Clips:
    """Sequences of 5, 7 and 9 tokens: 25, 17 and 15 of them; with batches of 12, epochs have 4 or 5 batches."""

    def __init__(self) -> None:
        self.buckets = [length for length, count in ((5, 25), (7, 17), (9, 15)) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "x": torch.full((self.buckets[index], 16), index / len(self))}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("index", "x")}


def _sampler(strategy: Any = None, **settings: Any) -> BucketBatchSampler:
    shard = {} if strategy is None else {"data_rank": strategy.data_rank, "data_size": strategy.data_size}
    return BucketBatchSampler(Clips().buckets, BATCH, seed=SEED, **shard, **settings)


def _epochs(count: int, **settings: Any) -> list[list[int]]:
    """The global batches of the first epochs, in one process."""
    sampler = _sampler(**settings)
    batches: list[list[int]] = []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        batches += sampler
    return batches


class Trains(LightningModule):
    """A user's module: its own loader, and the position of the sampler in its checkpoints."""

    def __init__(self, leftovers: str = "carry", endless: bool = False) -> None:
        super().__init__()
        self.plain = Plain()
        self.leftovers, self.endless = leftovers, endless
        self.seen: list[list[int]] = []
        self.validated = 0
        self.resumed: Any = None

    def train_dataloader(self) -> Any:
        strategy: Any = self.trainer.strategy
        if self.endless:
            return bucket_loader(Clips(), batch_size=BATCH, ranks=strategy, seed=SEED, start_step=self.global_step)
        self.sampler = _sampler(strategy, leftovers=self.leftovers)
        if self.resumed is not None:
            self.sampler.load_state_dict(self.resumed)
        data = Clips()
        return DataLoader(data, batch_sampler=self.sampler, collate_fn=data.collate)  # type: ignore[arg-type]

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.seen.append(batch["index"].tolist())
        return self.plain(batch["x"])[0].square().mean()

    def on_validation_start(self) -> None:
        self.validated += 1

    def validation_step(self, batch: Tensor, _: int) -> None: ...

    def val_dataloader(self) -> Any:
        return DataLoader([torch.zeros(1)])  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["sampler"] = self.sampler.state_dict(step=self.global_step) if not self.endless else None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.resumed = checkpoint["sampler"]


def _joined(shares: list[list[list[int]]], ring: int) -> list[list[int]]:
    """The global batches, from what each rank saw; context peers must have seen the same."""
    assert all(shares[rank] == shares[rank - rank % ring] for rank in range(len(shares)))
    groups = shares[::ring]
    assert len({len(share) for share in groups}) == 1
    return [list(chain(*parts)) for parts in zip(*groups)]


def _fit(rank: int, world: int, kind: str, ring: int, leftovers: str) -> tuple[list[list[int]], int]:
    module = Trains(leftovers)
    trainer_of(rank, world, STRATEGIES["trainer", kind](ring=ring, **BY_PLAN), max_epochs=5).fit(module)
    return module.seen, module.validated


@pytest.mark.parametrize(
    ("world", "ring", "kind", "leftovers"), [(4, 2, "cp", "carry"), (3, 1, "cp_fsdp", "carry"), (3, 3, "cp", "repeat")]
)
@pytest.mark.default(1)
def test_the_trainer_takes_every_batch_of_every_epoch(
    run_ranks: RankPool, world: int, ring: int, kind: str, leftovers: str
) -> None:
    everyone = run_ranks(world, _fit, kind, ring, leftovers, init=False)
    expected = _epochs(5, leftovers=leftovers)
    lengths = [len(_epochs(n + 1, leftovers=leftovers)) - len(_epochs(n, leftovers=leftovers)) for n in range(5)]
    assert len(set(lengths)) == (1 if leftovers == "repeat" else 2)  # "carry": epochs of different lengths
    assert _joined([seen for seen, _ in everyone], ring) == expected
    assert {validated for _, validated in everyone} == {5}
    counts = Counter(chain.from_iterable(expected))
    assert set(counts) == set(range(len(Clips())))
    if leftovers == "carry":
        assert set(counts.values()) <= {4, 5}


def _fit_twice(rank: int, world: int, ring: int, at: int, folder: Path, save: bool) -> list[list[int]]:
    module = Trains()
    settings: dict[str, Any] = {"max_steps": at} if save else {"max_steps": 25}
    trainer = trainer_of(rank, world, STRATEGIES["trainer", "cp"](ring=ring, **BY_PLAN), max_epochs=-1, **settings)
    trainer.fit(module, ckpt_path=None if save else folder / "saved.ckpt")
    if save:
        trainer.save_checkpoint(folder / "saved.ckpt")
    return module.seen


@pytest.mark.full
def test_a_trainer_that_resumes_in_an_epoch_at_another_degree_sees_the_same_samples(
    run_ranks: RankPool, tmp_path: Path
) -> None:
    seen, at = [], 7
    for world, ring, saves in ((4, 2, True), (3, 1, False)):
        ranks = run_ranks(world, _fit_twice, ring, at, tmp_path, saves, init=False)
        seen += _joined(ranks, ring)
    sampler = _sampler()
    sampler.seek(at)
    assert sampler.state_dict()["step"] != sampler.order.batches_before(sampler.epoch), "not in an epoch"
    assert seen == list(islice(EndlessBatches(_sampler()), 25))


def _limited(rank: int, world: int) -> list[list[int]]:
    module = Trains(endless=True)
    strategy = STRATEGIES["trainer", "cp"](ring=2, **BY_PLAN)
    trainer_of(rank, world, strategy, max_epochs=4, limit_train_batches=3).fit(module)
    return module.seen


def test_short_epochs_of_the_trainer_continue_in_the_endless_order(run_ranks: RankPool) -> None:
    assert _joined(run_ranks(2, _limited, init=False), 2) == list(islice(EndlessBatches(_sampler()), 12))


def _with_fabric(rank: int, world: int, kind: str, ring: int, start: int, epochs: int) -> list[list[int]]:
    ours = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=ring, **BY_PLAN))
    data, sampler = Clips(), _sampler(ours.strategy)
    if start:
        sampler.seek(start)
    loader = ours.setup_dataloaders(
        DataLoader(data, batch_sampler=sampler, collate_fn=data.collate),  # type: ignore[arg-type]
        use_distributed_sampler=False,
    )
    model, seen = ours.setup_module(Plain()), []
    for _ in range(epochs):
        for batch in loader:
            seen.append(batch["index"].tolist())
            ours.backward(model(batch["x"])[0].square().mean())
    return seen


@pytest.mark.parametrize(("world", "ring", "kind", "start"), [(3, 1, "cp", 7), (3, 3, "cp_fsdp", 0), (4, 2, "cp", 0)])
@pytest.mark.default(1)
def test_fabric_yields_the_batches_of_one_process(
    run_ranks: RankPool, world: int, ring: int, kind: str, start: int
) -> None:
    """From the beginning, and from within an epoch."""
    ranks = run_ranks(world, _with_fabric, kind, ring, start, 3 if start else 4, init=False)
    assert _joined(ranks, ring) == _epochs(4)[start:]
