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

from tests.dist.lightning_ranks import STRATEGIES, fabric_of, trainer_of
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
BY_NAME: dict[str, Any] = {"plans": {"Plain": PLAIN_PLAN}}


def seed_rank(rank: int) -> None:
    """Random states of ranks without a seed: different on each."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1000 + rank)


class Clips(Dataset[Tensor]):
    """Sixteen samples of 5 tokens, augmented at random where they are read."""

    def __init__(self, *, augments: bool = True) -> None:
        self.augments = augments

    def __len__(self) -> int:
        return 16

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
    rank: int, world: int, kind: str, seeds: list[int] | None, steps: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Batches and noise, by step.

    Args:
        seeds: for `seed_everything(workers=True)` by rank; None: unseeded ranks.
        options: `ring`, `workers`, `augments`, `shuffle`, and files to `save` to and to `resume` from.
    """
    if seeds is None:
        seed_rank(rank)
    else:
        seed_everything(seeds[rank], workers=True)
    module, strategy = Noisy(), STRATEGIES["trainer", kind](ring=options.get("ring", 2), **BY_NAME)
    trainer = trainer_of(rank, world, strategy, max_steps=steps)
    clips, shuffle = Clips(augments=options.get("augments", True)), options.get("shuffle", True)
    loader = DataLoader(clips, batch_size=2, shuffle=shuffle, num_workers=options.get("workers", 0))
    trainer.fit(module, loader, ckpt_path=options.get("resume"))
    if "save" in options:
        trainer.save_checkpoint(options["save"])
    return torch.stack(module.batches), torch.stack(module.drawn)


@pytest.mark.parametrize(
    ("world", "ring", "kind", "shuffle"),
    [(3, 3, "cp", False), (4, 2, "cp_fsdp", True)],  # shuffled orders share random states too
)
@pytest.mark.default(1)
def test_peers_draw_equal_numbers_without_a_seed_and_groups_do_not(
    run_ranks: RankPool, world: int, ring: int, kind: str, shuffle: bool
) -> None:
    """Ten steps of batches that are augmented in the main process: more than an epoch."""
    found = run_ranks(world, _trained, kind, None, 10, {"ring": ring, "shuffle": shuffle}, init=False)
    for first in range(0, world, ring):
        for batches, noise in found[first + 1 : first + ring]:
            assert torch.equal(batches, found[first][0])
            assert torch.equal(noise, found[first][1])
    if world > ring:
        assert not torch.isclose(found[0][1], found[ring][1]).any()
    assert len({float(x[0, 0, 1]) for x in found[0][1]}) == 10


def _fabric_workers(rank: int, world: int, kind: str) -> tuple[Tensor, Tensor]:
    seed_everything(7, workers=True)
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=2, **BY_NAME))
    fabric.setup(Plain())
    loader = fabric.setup_dataloaders(DataLoader(Clips(), batch_size=2, shuffle=True, num_workers=1))
    return torch.stack(list(loader)[:3]), torch.randn(3, 1)


@pytest.mark.parametrize(("flavour", "kind"), [("trainer", "cp"), ("fabric", "cp")])
@pytest.mark.default(1)
def test_workers_augment_by_data_rank(run_ranks: RankPool, flavour: str, kind: str) -> None:
    if flavour == "fabric":
        found = run_ranks(4, _fabric_workers, kind, init=False)
    else:
        found = run_ranks(4, _trained, kind, [7] * 4, 3, {"workers": 1}, init=False)
    batches, noise = [one[0] for one in found], [one[1] for one in found]
    assert torch.equal(batches[0], batches[1])
    assert torch.equal(batches[2], batches[3])
    augmented = [x[..., 0, 0] - x[..., 0, 1] for x in batches]
    assert not torch.isclose(augmented[0], augmented[2]).any()
    assert len(set(augmented[0].flatten().tolist())) == augmented[0].numel()
    assert torch.equal(noise[0], noise[1])
    assert not torch.isclose(noise[0], noise[2]).any(), "groups with equal seeds draw different numbers"


@pytest.mark.full
def test_a_resumed_fit_draws_what_it_would_have_drawn(run_ranks: RankPool, tmp_path: Path) -> None:
    """Two data groups with four batches an epoch; saved within one, and resumed with other seeds."""
    kind, at = "cp_fsdp", 3
    seeds, file, given = [0, 0, 10, 10], str(tmp_path / "half.ckpt"), {"augments": False}
    straight = run_ranks(4, _trained, kind, seeds, at + 2, given, init=False)
    run_ranks(4, _trained, kind, seeds, at, {**given, "save": file}, init=False)
    resumed = run_ranks(4, _trained, kind, [5] * 4, at + 2, {**given, "resume": file}, init=False)
    for (_, noise), (_, again) in zip(straight, resumed, strict=True):
        assert torch.equal(noise[at:], again)


def test_groups_of_one_seed_draw_different_noise_and_the_first_that_of_one_group(run_ranks: RankPool) -> None:
    given = {"ring": 1, "augments": False, "shuffle": False}
    found, alone = (
        [noise for _, noise in run_ranks(size, _trained, "cp", [3] * size, 2, given, init=False)] for size in (3, 1)
    )
    assert torch.equal(found[0], alone[0])
    assert not any(torch.isclose(a, b).any() for i, a in enumerate(found) for b in found[:i])


def _through_fabric(rank: int, world: int, path: Path) -> list[Any]:
    """What is drawn after a state is saved, and again after it is loaded."""

    def draw() -> tuple[list[float], float, float]:
        return torch.rand(3).tolist(), np.random.random(), random.random()

    seed_rank(rank)
    fabric = fabric_of(rank, world, STRATEGIES["fabric", "cp"](ring=2, **BY_NAME))
    state = {"model": fabric.setup(Plain()), "random": fabric.strategy.random_states}  # type: ignore[attr-defined]
    torch.rand(3)
    fabric.save(path, state)
    straight = draw()
    seed_rank(5)
    fabric.load(path, state)
    return [straight, draw()]


def test_fabric_saves_and_loads_random_states_as_an_entry_of_its_state(run_ranks: RankPool, tmp_path: Path) -> None:
    found = run_ranks(4, _through_fabric, tmp_path / "state.ckpt", init=False)
    assert all(straight == resumed for straight, resumed in found)
    assert found[0][0] != found[2][0]


def _subsets(rank: int, world: int, flavour: str) -> list[int]:
    data, order = Clips(augments=False), SubsetRandomSampler(range(16))
    loader: Any = DataLoader(data, batch_size=2, sampler=order)
    torch.manual_seed(1)
    strategy = STRATEGIES[flavour, "cp"](**BY_NAME)
    if flavour == "trainer":
        module = Noisy()
        trainer_of(rank, world, strategy, max_epochs=2).fit(module, loader)
        return [int(x) for batch in module.batches for x in batch[:, 0, 0]]
    fabric = fabric_of(rank, world, strategy)
    fabric.setup(Plain())
    loader = fabric.setup_dataloaders(loader)
    return [int(x) for _ in range(2) for batch in loader for x in batch[:, 0, 0]]


@pytest.mark.parametrize("flavour", ["trainer", "fabric"])
@pytest.mark.default(1)
def test_groups_divide_one_order_of_a_random_sampler(run_ranks: RankPool, flavour: str) -> None:
    first, second = run_ranks(2, _subsets, flavour, init=False)
    epochs = [first[i : i + 8] + second[i : i + 8] for i in (0, 8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 2
    assert epochs[0] != epochs[1]
