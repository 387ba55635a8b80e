"""Random numbers of user code: equal within a context group, different between groups, restored by resumed runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from lightning_cp import fabric as for_fabric
from lightning_cp.pytorch import ContextParallelFSDPStrategy, ContextParallelStrategy
from tests.dist.lightning_ranks import fabric_of, trainer_of
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
STRATEGIES: dict[str, Any] = {"cp": ContextParallelStrategy, "cp_fsdp": ContextParallelFSDPStrategy}


def seed_rank(rank: int) -> None:
    """Random states of ranks without a seed: different on each."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1000 + rank)


class Clips(Dataset[Tensor]):
    """Sixteen samples of 5 tokens, augmented at random where they are read."""

    def __init__(self, length: int = 16, *, augments: bool = True) -> None:
        self.length, self.augments = length, augments

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        clip = torch.full((5, 16), float(index))
        if self.augments:
            clip[:, 0] += torch.rand(()) + 2 * np.random.random() + 4 * random.random()
        return clip


class Noisy(LightningModule):
    """A module as anyone writes it: noise in the training step, from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Plain()
        self.batches: list[Tensor] = []
        self.drawn: list[Tensor] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        noise = torch.randn_like(batch) + np.random.random() + random.random()
        self.batches.append(batch)
        self.drawn.append(noise)
        loss: Tensor = (self.model(batch + noise)[0] - 1).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _trained(
    rank: int,
    world: int,
    kind: str,
    seeds: list[int] | None,
    *,
    steps: int,
    ring: int = 2,
    workers: int = 0,
    augments: bool = True,
    shuffle: bool = True,
    save: Path | None = None,
    resume: Path | None = None,
) -> tuple[Tensor, Tensor]:
    """Batches and noise, by step. Args: seeds: for `seed_everything(workers=True)` by rank; None: unseeded ranks."""
    if seeds is None:
        seed_rank(rank)
    else:
        seed_everything(seeds[rank], workers=True)
    module = Noisy()
    trainer = trainer_of(rank, world, STRATEGIES[kind](ring=ring, plans={"Plain": PLAIN_PLAN}), max_steps=steps)
    data = DataLoader(Clips(augments=augments), batch_size=2, shuffle=shuffle, num_workers=workers)
    trainer.fit(module, data, ckpt_path=None if resume is None else str(resume))
    if save is not None:
        trainer.save_checkpoint(save)
    return torch.stack(module.batches), torch.stack(module.drawn)


def _unseeded(rank: int, world: int, kind: str, ring: int, shuffle: bool) -> tuple[Tensor, Tensor]:
    return _trained(rank, world, kind, None, steps=10, ring=ring, shuffle=shuffle)


@pytest.mark.parametrize(
    ("world", "ring", "kind", "shuffle"),
    [
        pytest.param(2, 2, "cp", False, marks=pytest.mark.full),
        (3, 3, "cp", False),  # shuffled orders share random states too
        pytest.param(3, 3, "cp_fsdp", True, marks=pytest.mark.full),
        pytest.param(4, 2, "cp", True, marks=pytest.mark.full),
        (4, 2, "cp_fsdp", True),
    ],
)
@pytest.mark.default(1)
def test_peers_draw_equal_numbers_without_a_seed_and_groups_do_not(
    run_ranks: RankPool, world: int, ring: int, kind: str, shuffle: bool
) -> None:
    """Ten steps of batches that are augmented in the main process: more than an epoch."""
    found = run_ranks(world, _unseeded, kind, ring, shuffle, init=False)
    for first in range(0, world, ring):
        for batches, noise in found[first + 1 : first + ring]:
            assert torch.equal(batches, found[first][0])
            assert torch.equal(noise, found[first][1])
    if world > ring:
        assert not torch.isclose(found[0][1], found[ring][1]).any()
    assert len({float(x[0, 0, 1]) for x in found[0][1]}) == 10


def _with_workers(rank: int, world: int, kind: str) -> tuple[Tensor, Tensor]:
    return _trained(rank, world, kind, [7] * world, steps=3, workers=1)


@pytest.mark.parametrize("kind", ["cp", pytest.param("cp_fsdp", marks=pytest.mark.full)])
def test_workers_of_the_trainer_augment_by_data_rank(run_ranks: RankPool, kind: str) -> None:
    _check_workers(run_ranks(4, _with_workers, kind, init=False))


def _fabric_workers(rank: int, world: int, kind: str) -> tuple[Tensor, Tensor]:
    seed_everything(7, workers=True)
    name = {"cp": "ContextParallelStrategy", "cp_fsdp": "ContextParallelFSDPStrategy"}[kind]
    fabric = fabric_of(rank, world, getattr(for_fabric, name)(ring=2, plans={"Plain": PLAIN_PLAN}))
    fabric.setup(Plain())
    loader = fabric.setup_dataloaders(DataLoader(Clips(), batch_size=2, shuffle=True, num_workers=1))
    batches = torch.stack(list(loader)[:3])
    return batches, torch.randn(3, 1)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["cp", "cp_fsdp"])
def test_workers_of_fabric_augment_by_data_rank(run_ranks: RankPool, kind: str) -> None:
    _check_workers(run_ranks(4, _fabric_workers, kind, init=False))


def _check_workers(found: list[tuple[Tensor, Tensor]]) -> None:
    batches = [x for x, _ in found]
    assert torch.equal(batches[0], batches[1])
    assert torch.equal(batches[2], batches[3])
    augmented = [x[..., 0, 0] - x[..., 0, 1] for x in batches]
    assert not torch.isclose(augmented[0], augmented[2]).any()
    assert len(set(augmented[0].flatten().tolist())) == augmented[0].numel()
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.isclose(found[0][1], found[2][1]).any(), "groups with equal seeds draw different numbers"


def _interrupted(rank: int, world: int, folder: str, kind: str, at: int, augments: bool) -> bool:
    """True if a fit that is saved and resumed draws what one that is not interrupted draws, and trains on it."""
    seeds = [10 * (i // 2) for i in range(world)]
    given: dict[str, Any] = {"augments": augments}
    _, straight = _trained(rank, world, kind, seeds, steps=at + 2, **given)
    path = Path(folder) / "half.ckpt"
    _trained(rank, world, kind, seeds, steps=at, save=path, **given)
    _, resumed = _trained(rank, world, kind, [5] * world, steps=at + 2, resume=path, **given)
    return torch.equal(straight[at:], resumed)


@pytest.mark.parametrize(
    ("kind", "at", "augments"), [("cp", 2, False), pytest.param("cp_fsdp", 3, False, marks=pytest.mark.full)]
)
@pytest.mark.full
def test_a_resumed_fit_draws_what_it_would_have_drawn(
    run_ranks: RankPool, tmp_path: Path, kind: str, at: int, augments: bool
) -> None:
    """Two data groups with four batches an epoch; saved within one."""
    assert all(run_ranks(4, _interrupted, str(tmp_path), kind, at, augments, init=False))


def _seeded(rank: int, world: int, kind: str, ring: int) -> Tensor:
    return _trained(rank, world, kind, [3] * world, steps=2, ring=ring, augments=False, shuffle=False)[1]


@pytest.mark.parametrize(
    ("world", "ring", "kind"), [(3, 1, "cp"), pytest.param(4, 2, "cp_fsdp", marks=pytest.mark.full)]
)
def test_groups_of_one_seed_draw_different_noise_and_the_first_that_of_one_group(
    run_ranks: RankPool, world: int, ring: int, kind: str
) -> None:
    found = run_ranks(world, _seeded, kind, ring, init=False)
    alone = run_ranks(ring, _seeded, kind, ring, init=False)[0]
    assert torch.equal(found[0], alone)
    for i, noise in enumerate(found):
        assert torch.equal(noise, found[i - i % ring])
    groups = found[::ring]
    assert not any(torch.isclose(a, b).any() for i, a in enumerate(groups) for b in groups[:i])


def _saved(rank: int, world: int, path: Path, seeds: list[int]) -> Tensor:
    return _trained(rank, world, "cp", seeds, steps=2, save=path)[1]


def _regrouped(rank: int, world: int, path: Path, ring: int) -> tuple[Tensor, Tensor]:
    noise = _trained(rank, world, "cp", None, steps=4, ring=ring, resume=path, augments=False)[1]
    return noise, torch.rand(3)


@pytest.mark.full
def test_another_number_of_data_groups_draws_new_numbers(run_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    before = run_ranks(4, _saved, path, [1, 1, 2, 2], init=False)
    first, peer = run_ranks(2, _regrouped, path, 2, init=False)
    assert torch.equal(first[0], peer[0])
    again = run_ranks(2, _regrouped, path, 2, init=False)[0]
    assert torch.equal(first[0], again[0]), "restored states, whatever the seeds of the resumed run"
    for noise in (before[0], before[2]):
        assert not any(torch.equal(x, y) for x in first[0] for y in noise)


def _through_fabric(rank: int, world: int, path: Path) -> list[bool]:
    seed_rank(rank)
    fabric = fabric_of(rank, world, for_fabric.ContextParallelStrategy(ring=2, plans={"Plain": PLAIN_PLAN}))
    model = fabric.setup(Plain())
    state = {"model": model, "random": fabric.strategy.random_states}
    torch.rand(3)
    fabric.save(path, state)
    straight = torch.rand(3), np.random.random(), random.random()
    seed_rank(5)
    fabric.load(path, state)
    resumed = torch.rand(3), np.random.random(), random.random()
    return [torch.equal(straight[0], resumed[0]), straight[1:] == resumed[1:]]


def test_fabric_saves_and_loads_random_states_as_an_entry_of_its_state(run_ranks: RankPool, tmp_path: Path) -> None:
    assert all(map(all, run_ranks(4, _through_fabric, tmp_path / "state.ckpt", init=False)))


def _subsets(rank: int, world: int, flavour: str) -> list[int]:
    data, order = Clips(augments=False), SubsetRandomSampler(range(16))
    loader: Any = DataLoader(data, batch_size=2, sampler=order)
    torch.manual_seed(1)
    if flavour == "trainer":
        module = Noisy()
        strategy = ContextParallelStrategy(plans={"Plain": PLAIN_PLAN})
        trainer_of(rank, world, strategy, max_epochs=2).fit(module, loader)
        return [int(x) for batch in module.batches for x in batch[:, 0, 0]]
    fabric = fabric_of(rank, world, for_fabric.ContextParallelStrategy(plans={"Plain": PLAIN_PLAN}))
    fabric.setup(Plain())
    loader = fabric.setup_dataloaders(loader)
    return [int(x) for _ in range(2) for batch in loader for x in batch[:, 0, 0]]


@pytest.mark.parametrize("flavour", ["trainer", pytest.param("fabric", marks=pytest.mark.full)])
def test_groups_divide_one_order_of_a_random_sampler(run_ranks: RankPool, flavour: str) -> None:
    first, second = run_ranks(2, _subsets, flavour, init=False)
    epochs = [first[i : i + 8] + second[i : i + 8] for i in (0, 8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 2
    assert epochs[0] != epochs[1]
