"""Groups and ranks derived from meshes, in simulated worlds (torch's fake process group)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cp.config import ContextParallelConfig
from lightning_cp.mesh.groups import SINGLE_RANK, MeshGroups, check_world, groups_by_name, groups_for
from lightning_cp.mesh.sample_groups import sample_groups_for


@contextmanager
def pretended_world(rank: int, size: int) -> Iterator[None]:
    """A process group that moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _members(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def _of_every_rank(size: int, config: Callable[[], ContextParallelConfig]) -> list[MeshGroups]:
    """Groups of each rank (members of the groups are checked here, while the world exists)."""
    everyone = []
    for rank in range(size):
        with pretended_world(rank, size):
            settings = config()
            groups = groups_for(settings)
            ring, ulysses = groups.context_shape
            for group, degree in ((groups.ring, ring), (groups.ulysses, ulysses), (groups.context, ring * ulysses)):
                members = _members(group)
                assert (members is None) == (degree == 1)
                if members is not None:
                    assert len(members) == degree
                    assert members[dist.get_rank(group)] == rank
            assert groups_by_name(groups.name) is groups
            everyone.append(groups)
    return everyone


@pytest.mark.parametrize(
    ("shape", "names", "contexts"),
    [
        ((2, 1, 4), ("ring", "ulysses", "fsdp"), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ((2, 2, 2), ("dp", "ring", "ulysses"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((2, 2, 2), ("ring", "dp", "ulysses"), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ((2, 2, 2), ("ring", "ulysses", "dp"), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ((8, 1), ("ring", "ulysses"), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ((1, 8), ("ring", "ulysses"), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ((2, 2, 2, 2), ("pp", "ring", "dp", "ulysses"), [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]),
        ((4, 2, 2), ("dp", "ring", "ulysses"), [[4 * i + j for j in range(4)] for i in range(4)]),
        ((8, 1, 1), ("dp", "ring", "ulysses"), [[i] for i in range(8)]),
    ],
)
def test_context_groups_of_a_mesh_are_ring_major(
    shape: tuple[int, ...], names: tuple[str, ...], contexts: list[list[int]]
) -> None:
    size = torch.Size(shape).numel()
    everyone = _of_every_rank(
        size, lambda: ContextParallelConfig(mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    )
    for rank, groups in enumerate(everyone):
        assert contexts[groups.data_rank][groups.context_rank] == rank
        assert groups.data_size == len(contexts)
        assert groups.context_size == len(contexts[0])
        assert groups.context_rank == groups.ring_rank * groups.context_shape[1] + groups.ulysses_rank


@pytest.mark.parametrize(
    ("size", "ring", "ulysses"), [(8, 2, 2), (8, 8, 1), (8, 1, 4), (8, 1, 1), (16, 2, 4), (16, 3 + 1, 4), (6, 3, 2)]
)
def test_without_a_mesh_ulysses_is_innermost_and_data_outermost(size: int, ring: int, ulysses: int) -> None:
    for rank, groups in enumerate(_of_every_rank(size, lambda: ContextParallelConfig(ring, ulysses))):
        assert (groups.data_rank, groups.context_rank) == divmod(rank, ring * ulysses)
        assert (groups.ring_rank, groups.ulysses_rank) == divmod(groups.context_rank, ulysses)
        assert groups.data_size == size // (ring * ulysses)


def test_a_mesh_is_built_once_for_each_process_group() -> None:
    with pretended_world(1, 8):
        first = groups_for(ContextParallelConfig(2, 2))
        assert groups_for(ContextParallelConfig(2, 2, rotate_method="alltoall")) is first
        assert groups_for(ContextParallelConfig(4, 1)) is not first
        assert groups_for(ContextParallelConfig(2, 2)) is first
    with pretended_world(3, 16):
        second = groups_for(ContextParallelConfig(2, 2))
        assert second is not first
        assert (second.data_size, second.context_rank) == (4, 3)


def test_a_grid_has_rows_of_neighbours_in_the_ring_and_columns_across(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning_cp")
    members: set[tuple[str, tuple[int, ...]]] = set()
    for rank in range(16):
        with pretended_world(rank, 16):
            groups = groups_for(ContextParallelConfig(4, 2, rotate_method="grid"))
            assert groups is groups_for(ContextParallelConfig(4, 2, rotate_method="grid"))
            assert groups is not groups_for(ContextParallelConfig(4, 2, rotate_method="grid", grid=(1, 4)))
            for axis, group in (("row", groups.row), ("column", groups.column)):
                assert group is not None
                members.add((axis, tuple(dist.get_process_group_ranks(group))))
    expected = {(0, 2), (4, 6), (1, 3), (5, 7)}
    assert {x for axis, x in members if axis == "row"} == expected | {(a + 8, b + 8) for a, b in expected}
    expected = {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert {x for axis, x in members if axis == "column"} == expected | {(a + 8, b + 8) for a, b in expected}
    assert not caplog.messages
    with pretended_world(0, 3):
        for _ in range(2):
            groups = groups_for(ContextParallelConfig(3, rotate_method="grid"))
            assert groups is groups_for(ContextParallelConfig(3))
    assert len(caplog.messages) == 1
    assert "one column" in caplog.messages[0]


def test_two_meshes_of_one_shape_have_separate_groups() -> None:
    with pretended_world(5, 8):
        names = (("dp", "ring", "ulysses"), ("ring", "ulysses", "dp"))
        meshes = [init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=name) for name in names]
        groups = [groups_for(ContextParallelConfig(mesh=mesh)) for mesh in meshes]
        assert [(g.data_rank, g.context_rank) for g in groups] == [(1, 1), (1, 2)]


def test_degree_one_needs_no_process_group() -> None:
    assert groups_for(ContextParallelConfig()) is SINGLE_RANK
    assert groups_by_name(SINGLE_RANK.name) is SINGLE_RANK
    assert (SINGLE_RANK.context_size, SINGLE_RANK.context_rank, SINGLE_RANK.data_rank, SINGLE_RANK.data_size) == (
        1,
        0,
        0,
        1,
    )


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 3)])
def test_higher_degrees_need_one(ring: int, ulysses: int) -> None:
    with pytest.raises(ValueError, match=f"ring={ring} x ulysses={ulysses} needs a process group"):
        groups_for(ContextParallelConfig(ring, ulysses))


@pytest.mark.parametrize(
    ("ring", "ulysses", "text"),
    [
        (9, 1, "ring=9 x ulysses=1 needs 9 ranks, but the world size is 8"),
        (2, 8, "needs 16 ranks"),
        (3, 1, "= 3 must divide the world size 8"),
        (1, 5, "must divide"),
    ],
)
def test_degrees_that_do_not_fit_the_world_are_refused(ring: int, ulysses: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_world(ring, ulysses, 8)
    with pretended_world(0, 8), pytest.raises(ValueError, match=text):
        groups_for(ContextParallelConfig(ring, ulysses))


def test_a_mesh_without_this_rank_is_refused() -> None:
    with pretended_world(7, 8):
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("ring", "ulysses"))
        with pytest.raises(ValueError, match="does not contain this rank, 7"):
            groups_for(ContextParallelConfig(mesh=mesh))


@pytest.mark.parametrize(
    ("size", "cfg", "config", "samples"),
    [
        (4, 2, lambda: ContextParallelConfig(ring_degree=2), [[[0, 1], [2, 3]]]),
        (8, 2, lambda: ContextParallelConfig(ulysses_degree=2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (3, 3, lambda: ContextParallelConfig(), [[[0], [1], [2]]]),
        (
            16,
            2,
            lambda: ContextParallelConfig(ring_degree=2, ulysses_degree=2),
            [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]]],
        ),
        (4, 2, lambda: _mesh((2, 1, 2), ("ring", "ulysses", "cfg")), [[[0, 2], [1, 3]]]),
        (8, 1, lambda: _mesh((2, 2, 1, 2), ("cfg", "dp", "ring", "ulysses")), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (8, 2, lambda: _mesh((2, 2, 2), ("ring", "dp", "ulysses")), [[[0, 1, 4, 5], [2, 3, 6, 7]]]),
    ],
)
def test_guidance_branches_are_separate_from_context_groups(
    size: int, cfg: int, config: Callable[[], ContextParallelConfig], samples: list[list[list[int]]]
) -> None:
    for rank in range(size):
        with pretended_world(rank, size):
            settings = config()
            ranks = sample_groups_for(settings, cfg)
            assert sample_groups_for(settings, cfg) is ranks
            sample = samples[ranks.data_rank]
            assert ranks.data_size == len(samples)
            assert sample[ranks.cfg_rank][ranks.context.context_rank] == rank
            assert ranks.cfg == len(sample)
            assert _members(ranks.context.context) in (sample[ranks.cfg_rank], None)
            assert _members(ranks.cfg_groups.context) == [branch[ranks.context.context_rank] for branch in sample]
            assert _members(ranks.sample.context) == sorted(rank for branch in sample for rank in branch)
            everyone = [rank for branch in sample for rank in branch]
            assert everyone[ranks.sample.context_rank] == rank
            assert groups_by_name(ranks.cfg_groups.name) is ranks.cfg_groups
            assert groups_by_name(ranks.sample.name) is ranks.sample


@pytest.mark.parametrize(("cfg", "pipe", "ring"), [(1, 3, 1), (2, 3, 1), (2, 2, 3)])
def test_the_stages_of_a_branch_are_a_group_in_order(cfg: int, pipe: int, ring: int) -> None:
    size = cfg * pipe * ring
    for rank in range(size):
        with pretended_world(rank, size):
            ranks = sample_groups_for(ContextParallelConfig(ring_degree=ring), cfg, pipe)
            stages, first = ranks.stages, rank - ranks.stages.stage * ring
            assert (ranks.pipe, stages.num_stages, stages.stage) == (pipe, pipe, rank // ring % pipe)
            assert _members(stages.group) == [first + stage * ring for stage in range(pipe)]


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> ContextParallelConfig:
    return ContextParallelConfig(mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


def test_without_a_process_group_one_branch_is_all_there_is() -> None:
    ranks = sample_groups_for(ContextParallelConfig())
    assert (ranks.cfg, ranks.data_size, ranks.sample.context) == (1, 1, None)
    with pytest.raises(ValueError, match="cfg=2 needs a process group"):
        sample_groups_for(ContextParallelConfig(), 2)


@pytest.mark.parametrize(
    ("ring", "ulysses", "cfg", "connected"),
    [
        (4, 1, 1, [[0, 1, 2, 3]]),  # the context group is the ring's
        (1, 4, 1, [[0, 1, 2, 3]]),
        (2, 2, 1, [[0, 2], [0, 1], [0, 1, 2, 3]]),
        (2, 1, 2, [[0, 1], [0, 2], [0, 1, 2, 3]]),  # its ring; the branches; all ranks of the sample
    ],
)
def test_nccl_groups_run_a_collective_of_all_ranks_first(
    ring: int, ulysses: int, cfg: int, connected: list[list[int]]
) -> None:
    """Before it, a batch of point-to-point transfers in which some rank has no part would hang."""
    zeros = torch.zeros
    with (
        pretended_world(0, 4),
        mock.patch.object(dist, "all_reduce") as reduced,
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(torch, "zeros", lambda *shape, device: zeros(*shape)),
    ):
        sample_groups_for(ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses), cfg)
        groups = [call.kwargs["group"] for call in reduced.call_args_list]
        assert [dist.get_process_group_ranks(group) for group in groups] == connected


def test_other_groups_run_none() -> None:
    with pretended_world(0, 4), mock.patch.object(dist, "all_reduce") as reduced:
        groups_for(ContextParallelConfig(ring_degree=4))
        assert not reduced.called
