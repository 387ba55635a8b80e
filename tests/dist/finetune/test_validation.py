"""Validation: the losses of one process at every topology and batch size; training is not affected."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.families import Facts, Family, Sample, StoredBatch, collate, family_for, load_family
from lightning_cp.family_check import store
from lightning_cp.finetune.validation import Validation
from lightning_cp.objectives import objective_for
from lightning_cp.pytorch import ContextParallelFSDPStrategy as TrainerFSDPStrategy
from lightning_cp.pytorch import ContextParallelStrategy as TrainerStrategy
from lightning_cp.training.ranks import DataShard, TrainerRanks
from tests.dist.lightning_ranks import fabric_of, flat, trainer_of
from tests.harness import RankPool
from tests.pipelines import PIPES

pytestmark = pytest.mark.filterwarnings("ignore")
WIDE, TALL = (1, 16, 24), (1, 32, 16)
Losses = dict[torch.dtype, list[float]]


@dataclass
class Stored:
    """Samples in memory."""

    samples: list[Sample]
    sizes: list[tuple[int, int, int]]
    family: Family

    @property
    def buckets(self) -> list[tuple[int, int, int]]:
        return self.sizes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, item: int) -> Sample:
        return self.samples[item]

    def collate(self, samples: Sequence[Sample]) -> StoredBatch:
        return collate(samples, self.family.text)


@dataclass
class Given:
    """A tiny transformer in float64, and stored samples of two sizes."""

    transformer: nn.Module
    name: str
    facts: Facts
    samples: list[Sample]
    sizes: list[tuple[int, int, int]]

    def validation(self, batch_size: int) -> Validation:
        family = load_family(self.name, self.facts)
        data = Stored(self.samples, self.sizes, family)
        return Validation(data, family, objective_for(family, seed=3), quantiles=(0.2, 0.8), batch_size=batch_size)


def given(name: str) -> Given:
    torch.manual_seed(0)
    pipe = PIPES[name].make()
    family = family_for(pipe)
    sizes = [WIDE, TALL, WIDE, WIDE]
    samples = [
        store(family, pipe, [text], {"pixels": torch.rand(1, 3, *size) * 2 - 1})[0]
        for text, size in zip(["a cat", "two green birds fly over it", "rain", "a dog sleeps"], sizes)
    ]
    return Given(pipe.transformer.double().train(), family.name, family.facts, samples, sizes)


@pytest.fixture(scope="module")
def flux() -> Given:
    return given("flux")


def _losses(rank: int, world: int, given: Given, strategy: Any, batch_size: int) -> Losses:
    """The loss of each quantile and their mean, by the transformer's dtype."""
    kind, settings = strategy
    fabric = fabric_of(rank, world, kind(**settings) if settings is not None else kind)
    found = {}
    for dtype in (torch.float64, torch.float32):
        transformer = fabric.setup(copy.deepcopy(given.transformer).to(dtype))
        result = given.validation(batch_size).losses(transformer, fabric, DataShard.of(fabric.strategy))
        assert result.samples == len(given.samples)
        assert transformer.training
        found[dtype] = [*result.by_quantile.values(), result.loss]
    return found


@pytest.fixture(scope="module")
def alone(flux: Given, run_ranks: RankPool) -> Losses:
    """The losses of one process."""
    (found,) = run_ranks(1, _losses, flux, ("auto", None), 1, timeout_s=120)
    return found  # type: ignore[no-any-return]


TOPOLOGIES = {
    "ring3": (3, (ContextParallelStrategy, {"ring": 3})),
    "data3": (3, (ContextParallelStrategy, {})),  # the shares of the four samples are 1, 1 and 2
    "cp_fsdp_data2_ring2": (4, (ContextParallelFSDPStrategy, {"ring": 2})),
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.full
def test_the_losses_are_those_of_one_process(topology: str, flux: Given, alone: Losses, run_ranks: RankPool) -> None:
    world, strategy = TOPOLOGIES[topology]
    found = run_ranks(world, _losses, flux, strategy, 2, timeout_s=120)
    assert all(losses == found[0] for losses in found), "every rank returns the same numbers"
    assert found[0][torch.float64] == pytest.approx(alone[torch.float64], rel=1e-7)  # float32 sums over ranks
    assert found[0][torch.float32] == pytest.approx(alone[torch.float32], rel=1e-5)
    assert len(set(alone[torch.float64])) == 3, "the losses at the quantiles differ"


@pytest.mark.parametrize("batch_size", [2, 8])
def test_the_batch_size_does_not_change_the_losses(
    batch_size: int, flux: Given, alone: Losses, run_ranks: RankPool
) -> None:
    (found,) = run_ranks(1, _losses, flux, ("auto", None), batch_size)
    assert found[torch.float64] == pytest.approx(alone[torch.float64], rel=1e-9)
    assert found[torch.float32] == pytest.approx(alone[torch.float32], rel=1e-5)


class FineTuning(LightningModule):
    """A module that validates after every step if `validates` is True."""

    def __init__(self, given: Given, validates: bool) -> None:
        super().__init__()
        self.transformer, self.given, self.validates = copy.deepcopy(given.transformer), given, validates
        self.family = load_family(given.name, given.facts)
        self.objective = objective_for(self.family, seed=0)
        self.validation = given.validation(batch_size=2)
        self.losses: list[float] = []

    def training_step(self, batch: StoredBatch, _: int) -> Tensor:
        return self.objective.loss(self.transformer, self.family, batch, step=self.global_step, first_index=0)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.validates:
            with self.trainer.precision_plugin.forward_context():
                result = self.validation.losses(
                    self.transformer, TrainerRanks(self.trainer), DataShard.of(self.trainer.strategy)
                )
            self.losses.append(result.loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(rank: int, world: int, given: Given, strategy: Any, validates: bool) -> tuple[list[float], Tensor]:
    """Validation losses after each of two steps, and the final weights."""
    if isinstance(strategy, tuple):
        kind, settings = strategy
        strategy = kind(**settings)
    module = FineTuning(given, validates)
    batches = [collate([given.samples[i]], module.family.text) for i in (0, 1)]
    trainer = trainer_of(rank, world, strategy, max_epochs=1)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.losses, flat(module.transformer)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "strategy"),
    [(3, (TrainerFSDPStrategy, {"ring": 3})), (2, (TrainerStrategy, {"ring": 2}))],
    ids=["cp_fsdp_ring3", "ring2"],
)
def test_the_trainer_validates_and_trains_on_unchanged(
    world: int, strategy: Any, flux: Given, run_ranks: RankPool
) -> None:
    ((_, weights),) = run_ranks(1, _fit, flux, "auto", False, timeout_s=120)
    ((expected, _),) = run_ranks(1, _fit, flux, "auto", True, timeout_s=120)
    for losses, found in run_ranks(world, _fit, flux, strategy, True, timeout_s=120):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert torch.allclose(found, weights, atol=1e-6)
    assert len(set(expected)) == 2, "the weights were trained in between"
