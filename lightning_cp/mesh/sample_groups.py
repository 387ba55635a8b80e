"""Process groups of the ranks that share one sample: branches of guidance, stages of blocks, and shards of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.config import ContextParallelConfig
from lightning_cp.mesh.groups import SINGLE_RANK, MeshGroups, as_ring, cached, connect, groups_for, new_groups


@dataclass(frozen=True, eq=False)
class StageGroup:
    """The ranks that hold the stages of the blocks, one each: the same tokens of the same branch of guidance.

    Attributes:
        group: process group of these ranks, in the order of the stages; None for a single stage.
        stage: index of this rank's stage.
        num_stages: number of stages.
    """

    group: dist.ProcessGroup | None
    stage: int
    num_stages: int


@dataclass(frozen=True, eq=False)
class SampleGroups:
    """Process groups of this rank among the ranks that share one sample.

    With `cfg` or `pipe` above 1, several context groups share a sample: each has one CFG branch, or some of the blocks.

    Attributes:
        context: groups over which the tokens of this branch are sharded.
        cfg_groups: ranks that hold the same tokens and blocks, one from each branch, as a ring.
        sample: all ranks that share a sample (cfg x pipe x ring x ulysses), as a ring.
        data_rank, data_size: index of this sample, and number of samples computed at a time.
        stages: ranks that hold the same tokens of the same branch, one from each stage of blocks.
        pipe_results: for each branch, a process group in which its last stage sends results: the ranks that hold the
            same tokens, of all branches and stages (in this order). Empty for a single branch and stage.
        control: a gloo group of the ranks in `sample`, for messages between hosts only; None for a single rank.
    """

    context: MeshGroups
    cfg_groups: MeshGroups
    sample: MeshGroups
    data_rank: int
    data_size: int
    stages: StageGroup
    pipe_results: tuple[dist.ProcessGroup, ...] = ()
    control: dist.ProcessGroup | None = None

    @property
    def cfg(self) -> int:
        """Number of branches computed at a time."""
        return self.cfg_groups.context_size

    @property
    def cfg_rank(self) -> int:
        """Index of this rank's branch."""
        return self.cfg_groups.context_rank

    @property
    def pipe(self) -> int:
        """Number of stages that the blocks are divided into."""
        return self.stages.num_stages


def sample_groups_for(
    config: ContextParallelConfig, cfg: int = 1, pipe: int = 1, shares: object = None
) -> SampleGroups:
    """Return the groups that share a prompt, on the mesh of `config` or on a data x cfg x pipe x ring x ulysses mesh.

    If the mesh has an axis named `cfg` or `pipe`, its size is used; otherwise `cfg` x `pipe` neighbouring context
    groups share a prompt.

    Args: shares: see `groups_for`; the same for all branches.
    Ranks: every rank of the world, at first use. Raises: ValueError: the degrees do not fit the world, or the mesh.
    """
    groups = groups_for(config, shares)
    cfg, pipe = _size_of(config.mesh, "cfg", cfg), _size_of(config.mesh, "pipe", pipe)
    if cfg == pipe == 1 and groups is SINGLE_RANK:
        return SampleGroups(SINGLE_RANK, SINGLE_RANK, SINGLE_RANK, 0, 1, StageGroup(None, 0, 1))
    if not dist.is_initialized():
        degree = f"cfg={cfg}" if pipe == 1 else f"pipe={pipe}"
        raise ValueError(f"{degree} needs a process group: call torch.distributed.init_process_group first")
    context = groups.context_size
    if groups.data_size % (cfg * pipe):
        needed = cfg * pipe * context
        raise ValueError(
            f"cfg={cfg} x {f'pipe={pipe} x ' if pipe > 1 else ''}ring={config.ring} x ulysses={config.ulysses} = "
            f"{needed} must divide the world size {groups.data_size * context}: start a multiple of {needed} ranks"
        )
    return cached(("branches", cfg, pipe, groups.name), lambda: _build_sample_groups(groups, cfg, pipe))


def _size_of(mesh: DeviceMesh | None, axis: str, degree: int) -> int:
    """Return the size of a mesh axis, or the given degree if there is no such axis. Raises: ValueError: they differ."""
    names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
    if axis not in names:
        return degree
    assert mesh is not None, "its axes were read above"
    size = mesh.size(names.index(axis))
    if degree not in (1, size):
        raise ValueError(f"{axis}={degree} contradicts the mesh: its axis '{axis}' has size {size}; leave {axis} out")
    return size


def _build_sample_groups(groups: MeshGroups, cfg: int, pipe: int) -> SampleGroups:
    mesh = groups.mesh
    assert mesh is not None, "ranks of a process group have a mesh"
    names = tuple(mesh.mesh_dim_names or ())
    inner = [names.index(axis) for axis in ("cfg", "pipe", "ring", "ulysses") if axis in names]
    others = [axis for axis in range(mesh.ndim) if axis not in inner]
    ranks = mesh.mesh.permute(*others, *inner).reshape(-1, cfg, pipe, groups.context_size)
    data_rank, cfg_rank, pipe_rank, context_rank = (ranks == dist.get_rank()).nonzero()[0].tolist()
    sample, by_branch, by_stage = groups.context, None, None
    results: list[dist.ProcessGroup] = []
    if cfg > 1:  # collective: every rank creates all groups in the same order
        by_branch = new_groups(ranks.permute(0, 2, 3, 1))
        results = [by_branch] * cfg
    if pipe > 1:
        by_stage = new_groups(ranks.permute(0, 1, 3, 2))
        results = [new_groups(ranks.permute(0, 3, 1, 2).flatten(2)) for _ in range(cfg)]
    if cfg > 1 or pipe > 1:
        sample = new_groups(ranks.flatten(1))
        connect(by_branch, by_stage, *results, sample)
    control = None
    if cfg * pipe * groups.context_size > 1:
        control = _new_control_groups(ranks.flatten(1))
    sample_size = cfg * pipe * groups.context_size
    sample_rank = (cfg_rank * pipe + pipe_rank) * groups.context_size + context_rank
    return SampleGroups(
        context=groups,
        cfg_groups=as_ring(groups, by_branch, cfg, cfg_rank, name="cfg"),
        sample=as_ring(
            groups,
            sample,
            sample_size,
            sample_rank,
            name="sample",
            shares=None if groups.shares is None else groups.shares * (cfg * pipe),
        ),
        data_rank=data_rank,
        data_size=len(ranks),
        stages=StageGroup(by_stage, pipe_rank, pipe),
        pipe_results=tuple(results),
        control=control,
    )


def world_control(purpose: str) -> dist.ProcessGroup:
    """Return a gloo group of all ranks, for messages between hosts only; build it at first use.

    Args: purpose: what the messages are about. Each has a group of its own, so that messages of two threads, or of
        ranks that are at different places, never pair up.
    Ranks: the world.
    """
    return cached(("control", purpose), lambda: _new_control_groups(torch.arange(dist.get_world_size())))


def _new_control_groups(ranks: torch.Tensor) -> dist.ProcessGroup:
    """Create a gloo group for each row of `ranks` [..., n], and return this rank's."""
    simulated = dist.get_backend() == "fake"  # a world that sends nothing, in tests and benchmarks of one rank
    return new_groups(ranks, backend=None if simulated else "gloo")
