"""Meshes on real ranks: which ranks share a sample, and attention within each group."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_cp.config import ContextParallelConfig
from lightning_cp.mesh.groups import MeshGroups, groups_for
from tests.dist.problems import Problem, errors, expect, part_of, solve, whole
from tests.harness import RankPool

# shape, names, and the context groups in order of data rank
MESHES = {
    "fsdp inside": (4, (2, 1, 2), ("ring", "ulysses", "fsdp"), [[0, 2], [1, 3]]),
    "dp outside": (4, (2, 1, 2), ("dp", "ring", "ulysses"), [[0, 1], [2, 3]]),
    "two around": (6, (1, 3, 1, 2), ("dp", "ring", "ulysses", "fsdp"), [[0, 2, 4], [1, 3, 5]]),
    "between": (6, (3, 2, 1), ("ring", "dp", "ulysses"), [[0, 2, 4], [1, 3, 5]]),
    "unified": (6, (3, 2), ("ring", "ulysses"), [[0, 1, 2, 3, 4, 5]]),
    "unified and dp": (4, (2, 1, 2), ("ring", "dp", "ulysses"), [[0, 1, 2, 3]]),
}


def _through_mesh(rank: int, world: int, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, int, float]:
    """Attention on a problem of each data rank's own; (data rank, context rank, largest error)."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    config = ContextParallelConfig(mesh=mesh)
    groups = groups_for(config)
    assert groups_for(config) is groups
    assert groups_for(ContextParallelConfig(mesh=mesh, rotate_method="alltoall")) is groups
    lengths = tuple(2 + (i * 3 + groups.data_rank) % 4 for i in range(groups.context_size))
    problem = Problem(config.ring, config.ulysses, lengths, lengths, mask="keys", scale=0.3 + groups.data_rank)
    worst = 0.0
    for known in (True, False):
        case = replace(problem, known=known)
        given = whole(case)
        actual = solve(case, given, groups.context_rank, parallel_config=config)
        found = errors(actual, part_of(expect(case, given), case, groups.context_rank))
        worst = max(worst, *found.values())
    assert groups.data_size == world // groups.context_size
    return groups.data_rank, groups.context_rank, worst


@pytest.mark.parametrize("name", MESHES)
def test_attention_stays_within_the_context_groups_of_a_mesh(run_ranks: RankPool, name: str) -> None:
    world, shape, names, groups = MESHES[name]
    answers = run_ranks(world, _through_mesh, shape, names)
    for rank, (data_rank, context_rank, worst) in enumerate(answers):
        assert groups[data_rank][context_rank] == rank
        assert worst < 1e-10


def _refused(rank: int, world: int) -> str:
    mesh = DeviceMesh("cpu", torch.arange(world).flip(0).reshape(world, 1), mesh_dim_names=("ring", "ulysses"))
    with pytest.raises(ValueError, match="ranks of a context group must ascend") as caught:
        groups_for(ContextParallelConfig(mesh=mesh))
    return str(caught.value)


def test_a_mesh_in_another_order_than_its_process_groups_is_refused(run_ranks: RankPool) -> None:
    """torch sorts the ranks of a group, so tokens would be gathered in another order than they were sharded."""
    for message in run_ranks(3, _refused):
        assert "but are [[2, 1, 0]]" in message


def _two_worlds(rank: int, world: int) -> list[tuple[int, int]]:
    """Context size and a sum over the context group, in a world of three and then one of two."""
    facts = []
    store = dist.distributed_c10d._get_default_store()
    previous: weakref.ref[MeshGroups] | None = None
    for size in (3, 2):
        dist.destroy_process_group()
        if rank >= size:
            return facts
        fresh = dist.PrefixStore(f"world of {size}", store)
        dist.init_process_group("gloo", store=fresh, rank=rank, world_size=size, timeout=timedelta(seconds=120))
        groups = groups_for(ContextParallelConfig(ring_degree=size))
        assert groups_for(ContextParallelConfig(ring_degree=size)) is groups
        gc.collect()
        assert previous is None or previous() is None, "what was built for the last world is still held"
        x = torch.ones(1)
        dist.all_reduce(x, group=groups.context)
        facts.append((groups.context_size, int(x)))
        previous = weakref.ref(groups)
        del groups
    return facts


def test_a_new_world_starts_fresh(run_ranks: RankPool) -> None:
    first, second, third = run_ranks(3, _two_worlds)
    assert first == second == [(3, 3), (2, 2)]
    assert third == [(3, 3)]
