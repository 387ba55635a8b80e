"""Helpers of the strategies for shards and random numbers, peers that differ, and which modules are parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.engine.apply import installed_on
from lightning_cp.errors import PeerMismatchError, PlanError, ShapeError
from lightning_cp.fabric import ContextParallelStrategy
from tests.dist.lightning_ranks import BY_PLAN, fabric_of
from tests.dist.module import inputs
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


def _of_the_step(rank: int, world: int, degree: int) -> tuple[bool, list[Any]]:
    """Whether the helpers for shards follow a smaller degree, and this rank's draws: at both degrees, in that order."""
    strategy = ContextParallelStrategy(ring=world, degrees={8: degree})
    fabric_of(rank, world, strategy)
    draws, is_right = [], True
    for size in (world, degree, world):
        strategy.use_degree(None if size == world else degree)
        first, group = rank // size * size, rank // size
        sample = torch.arange(6.0) + 10 * group
        own = strategy.shard({"x": sample}, {"x": 0})["x"].requires_grad_()
        counts = [len(x) for x in torch.tensor_split(sample, size)]
        weighted = strategy.local_mean(own.mean(), len(own))
        is_right &= len(own) == counts[rank - first]
        is_right &= torch.equal(strategy.gather(own, 0), sample)
        is_right &= torch.isclose(weighted, own.mean() * size * len(own) / 6).item()
        is_right &= strategy.all_gather(torch.tensor(group)).tolist() == list(range(world // size))
        is_right &= strategy.all_reduce(torch.tensor(1.0), reduce_op="sum") == world // size
        is_right &= strategy.broadcast(rank) == 0
        draws.append(torch.rand(3, generator=strategy.generator(5)).tolist())
    return bool(is_right), draws


@pytest.mark.parametrize(("world", "degree"), [(3, 1), (4, 2)])
@pytest.mark.default("4-2")
def test_helpers_for_shards_follow_the_degree_of_the_step(run_ranks: RankPool, world: int, degree: int) -> None:
    found = run_ranks(world, _of_the_step, degree, init=False)
    for rank, (is_right, (largest, smaller, again)) in enumerate(found):
        assert is_right
        assert largest == again == found[0][1][0]
        assert smaller == found[rank // degree * degree][1][1]
    assert len({tuple(draws[1]) for _, draws in found}) == world // degree


def _unlike_shards(rank: int, world: int) -> tuple[list[str], Any]:
    strategy, said = ContextParallelStrategy(ring=world), []
    fabric_of(rank, world, strategy)
    x = torch.ones(2, 2 + (rank == world - 1))
    for one, dim in ((x, 0), (x[:, 0].to(torch.int64) if rank else x[:, 0], 0), (x, 2)):
        with pytest.raises((PeerMismatchError, ShapeError)) as caught:
            strategy.gather(one, dim)
        said.append(str(caught.value))
    with pytest.raises(ShapeError) as caught:
        strategy.shard({"x": x}, {"x": -3})
    return [*said, str(caught.value)], strategy.gather(x, 1).shape


def test_shards_that_cannot_be_gathered_are_refused_on_every_rank(run_ranks: RankPool) -> None:
    for (shapes, dtypes, dim, sharded), shape in run_ranks(3, _unlike_shards, init=False):
        assert "cannot be gathered along dim 0: shards may differ" in shapes
        assert "cannot be gathered along dim 0: shards may differ" in dtypes
        assert dim.startswith("dim 2 must be a dim of the tensor (2, ")
        assert sharded.startswith("dim -3 must be a dim of the tensor (2, ")
        assert shape == (2, 7)


REFUSED = {"first": [1], "always": [1, 3], "off": []}


def _peers(rank: int, world: int) -> dict[str, list[int]]:
    """Return which of four forwards raised an error for different arguments, for each value of `check_peers`."""
    refused: dict[str, list[int]] = {}
    for check_peers in REFUSED:
        fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world, check_peers=check_peers, **BY_PLAN))
        wrapped = fabric.setup(Plain())
        refused[check_peers] = []
        for forward in range(4):
            try:
                with torch.no_grad():
                    wrapped(inputs() * (rank + 1) if forward in (1, 3) else inputs())
            except PeerMismatchError as error:
                refused[check_peers] += [forward] if "argument x" in str(error) or " x " in str(error) else []
    return refused


def test_differing_peers_are_refused_as_often_as_check_peers_says(run_ranks: RankPool) -> None:
    assert run_ranks(2, _peers, init=False) == [REFUSED] * 2


def _selection(rank: int, world: int) -> tuple[list[str], list[bool]]:
    said, installed = [], []
    for settings in ({"plans": {"Plian": PLAIN_PLAN}}, {"modules": ["Plian"]}, {"modules": ["blocks"]}):
        with pytest.raises(PlanError) as caught:
            fabric_of(rank, world, ContextParallelStrategy(ring=world, **settings)).setup(Plain())
        said.append(str(caught.value))
    for settings in ({"modules": [Plain]}, {"modules": ["Plain"]}, {"modules": ["0"]}, {}):
        fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world, plans={"Plain": PLAIN_PLAN}, **settings))
        holder = nn.Sequential(Plain())
        fabric.setup(holder)
        installed.append(installed_on(holder[0]) is not None)
    return said, installed


def test_modules_and_plans_are_named_by_class_name_or_path_and_must_be_there(run_ranks: RankPool) -> None:
    for (plans, modules, blocks), installed in run_ranks(2, _selection, init=False):
        assert "'Plian'" in plans
        assert "'Plian'" in modules
        assert "no plan is registered" in blocks
        assert installed == [True] * 4
