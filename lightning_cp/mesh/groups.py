"""Build process groups from settings: ranks of a context group share a sample, data groups hold different samples.

Rank order inside a context group is ring-major: `context rank = ring coordinate * ulysses degree + ulysses
coordinate`. Other mesh axes, in any position, do not change it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_cp.compat.compiler import uncompiled
from lightning_cp.compat.torch_names import take_default_timeout
from lightning_cp.config import ContextParallelConfig
from lightning_cp.mesh.degrees import Shares, check_shares

T = TypeVar("T")
_log = logging.getLogger("lightning_cp")
_KEPT = 1024  # a model has a few kinds of attention and of token counts for each size of its inputs


class Memo:
    """Base of objects that keep what was derived from them. Attributes: memo: values by facts, see `memoize`."""

    memo: dict[Hashable, Any]

    def memoize(self, facts: Hashable, build: Callable[[], T]) -> T:
        """Return what was built for these facts before, or build it; kept as long as the object."""
        value: T | None = self.memo.get(facts)
        if value is None:
            if len(self.memo) >= _KEPT:
                self.memo.clear()
            value = self.memo[facts] = build()
        return value


@dataclass(frozen=True, eq=False)
class MeshGroups(Memo):
    """Process groups of one mesh that this rank belongs to.

    Attributes:
        name: key by which the attention operators look up this object.
        mesh: the mesh; None for degrees 1 x 1 without a process group.
        ring, ulysses, context: process groups; None if the degree is 1. `context` has ring x ulysses ranks.
        context_shape: (ring, ulysses) degrees.
        context_rank: index of this rank in its context group.
        data_rank, data_size: index of this context group, and number of context groups.
        shares: weight of each rank of the context group, by which tokens are divided; None: equal.
        memo: values that were derived from shapes and settings, see `memoize`.
        row, column: process groups of a grid: `columns` neighbours in the ring, and its ranks at equal places in rows;
            None if the size is 1, or without a grid.
        columns: number of columns of the grid, see `ContextParallelConfig.grid`; 1: no grid.
        compared: what ranks of the context group have found to be equal, see `note_compared`.
    """

    name: str
    mesh: DeviceMesh | None
    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None
    context: dist.ProcessGroup | None
    context_shape: tuple[int, int]
    context_rank: int
    data_rank: int
    data_size: int
    shares: Shares | None = None
    row: dist.ProcessGroup | None = None
    column: dist.ProcessGroup | None = None
    columns: int = 1
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    compared: set[Hashable] = field(default_factory=set, repr=False)

    def note_compared(self, facts: Hashable) -> None:
        """Note what the ranks of the context group have compared, at the same time on all of them."""
        if len(self.compared) >= _KEPT:
            self.compared.clear()
        self.compared.add(facts)

    @property
    def context_size(self) -> int:
        """Number of ranks that share one sample."""
        return self.context_shape[0] * self.context_shape[1]

    @property
    def ring_rank(self) -> int:
        """Index of this rank in its ring."""
        return self.context_rank // self.context_shape[1]

    @property
    def ulysses_rank(self) -> int:
        """Index of this rank in its Ulysses group."""
        return self.context_rank % self.context_shape[1]


SINGLE_RANK = MeshGroups("single_rank", None, None, None, None, (1, 1), 0, 0, 1)


class _GroupCache:
    """Cache of the groups of one world. A new world clears it at first use: cached meshes keep the old one alive."""

    def __init__(self) -> None:
        self.world: dist.ProcessGroup | None = None
        self.groups: dict[object, Any] = {}

    def of(self, world: dist.ProcessGroup) -> dict[object, Any]:
        """Return the groups by degrees or mesh; an empty dict for a new world."""
        if self.world is not world:
            self.world, self.groups = world, {}
        return self.groups


_cache = _GroupCache()
# Operators take the name of their groups, because a process group cannot be an operator's argument.
_by_name: WeakValueDictionary[str, MeshGroups] = WeakValueDictionary({SINGLE_RANK.name: SINGLE_RANK})
# Numbers in the groups' names. A name is a constant of compiled graphs, and torch's compile cache reuses a graph only
# if the next process gives the same name: a counter does, `id()` would not.
_numbers = itertools.count()


def cached(key: object, build: Callable[[], T]) -> T:
    """Return the object cached under `key` for this world; build it at first use. Ranks: those that `build` needs."""
    assert dist.group.WORLD is not None, "an initialised process group has a world"
    built = _cache.of(dist.group.WORLD)
    if key not in built:
        built[key] = build()
    value: T = built[key]
    return value


def cached_groups() -> tuple[object, ...]:
    """Return the process group of the last world, which may be destroyed by now, and what was built for it."""
    return (_cache.world, *_cache.groups.values())


def groups_by_name(name: str) -> MeshGroups:
    """Return the groups that an operator received by name."""
    return _by_name[name]


def groups_for(config: ContextParallelConfig, shares: object = None) -> MeshGroups:
    """Return the groups of the mesh in `config`, or of a mesh over the world; build them at first use.

    Args: shares: weight of each rank of a context group, the same for all groups; None: equal. See `check_shares`.
    Ranks: every rank of the world, at first use of a mesh.
    Raises: ValueError: the degrees do not fit the world, there is no process group, or the shares are invalid.
    """
    weights = check_shares(shares, ring=config.ring, ulysses=config.ulysses)
    if config.mesh is None and config.mesh_shape == (1, 1) and not dist.is_initialized():
        return SINGLE_RANK
    if not dist.is_initialized():
        raise ValueError(
            f"ring={config.ring} x ulysses={config.ulysses} needs a process group: call "
            "torch.distributed.init_process_group first, start with torchrun, or use lightning_cp's strategy"
        )
    assert dist.group.WORLD is not None, "an initialised process group has a world"
    built = _cache.of(dist.group.WORLD)
    key: object = config.mesh_shape if config.mesh is None else id(config.mesh)
    if key not in built:
        uncompiled(_add_groups)(config, built, key)
    if weights is not None:
        equal, key = built[key], (key, weights)
        if key not in built:
            name = f"{equal.name}:{':'.join(map(str, weights))}"
            built[key] = _by_name[name] = replace(equal, name=name, shares=weights, memo={}, compared=set())
    if config.rotate_method == "grid":
        plain, key = built[key], (key, config.grid_shape[1])
        if key not in built:
            uncompiled(_add_grid)(plain, config.grid_shape, built, key)
    groups_of_mesh: MeshGroups = built[key]
    return groups_of_mesh


def _add_groups(config: ContextParallelConfig, built: dict[object, Any], key: object) -> None:
    groups = _build_groups(config.mesh if config.mesh is not None else _world_mesh(config))
    built[key] = groups  # keeps the mesh alive, so that no other mesh gets its id
    _by_name[groups.name] = groups


def _add_grid(plain: MeshGroups, grid: tuple[int, int], built: dict[object, Any], key: object) -> None:
    rows, columns = grid
    built[key] = plain
    if columns > 1:
        assert plain.mesh is not None, "ranks of a ring have a mesh"
        ranks = _context_ranks(plain.mesh).view(-1, rows, columns, plain.context_shape[1])
        row = new_groups(ranks.permute(0, 1, 3, 2))
        column = new_groups(ranks.permute(0, 2, 3, 1)) if rows > 1 else None
        connect(row, column)
        name = f"{plain.name}:grid{rows}x{columns}"
        grid_groups = replace(plain, name=name, row=row, column=column, columns=columns, memo={}, compared=set())
        built[key] = _by_name[name] = grid_groups
    elif rows > 1 and dist.get_rank() == 0:
        _log.info(
            f"rotate_method='grid' with ring={rows}: the grid has one column, so K and V are all-gathered as with "
            "rotate_method='allgather'"
        )


def new_groups(ranks: torch.Tensor, backend: str | None = None) -> dist.ProcessGroup:
    """Create a group for each row of `ranks` [..., n], and return this rank's. Ranks: the world."""
    group, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, ranks.shape[-1]).tolist(), backend=backend)  # type: ignore[no-untyped-call]
    local_group: dist.ProcessGroup = group
    if dist.get_backend() != "fake":
        take_default_timeout(local_group)  # torch gives it to the world only
    return local_group


def cuda_backend_is(backend: str, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a group (default: the world) uses `backend` for CUDA tensors; CPU tensors may use another one.

    `dist.get_backend` is not enough: for "cpu:gloo,cuda:nccl" it returns that string.
    """
    return f"cuda:{backend}" in str(dist.get_backend_config(group)).split(",")


def check_world(ring: int, ulysses: int, world: int) -> int:
    """Return the number of context groups. Raises: ValueError: ring x ulysses does not divide the world size."""
    context = ring * ulysses
    if context > world:
        raise ValueError(
            f"ring={ring} x ulysses={ulysses} needs {context} ranks, but the world size is {world}: "
            f"start {context} ranks (or a multiple), or lower a degree"
        )
    if world % context:
        raise ValueError(
            f"ring={ring} x ulysses={ulysses} = {context} must divide the world size {world}: "
            f"start a multiple of {context} ranks"
        )
    return world // context


def _world_mesh(config: ContextParallelConfig) -> DeviceMesh:
    data = check_world(config.ring, config.ulysses, dist.get_world_size())
    device_type = "cuda" if cuda_backend_is("nccl") and torch.cuda.is_available() else "cpu"
    if device_type == "cpu" and (world := dist.group.WORLD) is not None:
        world.bound_device_id = None  # set by Lightning for GPUs; torch then splits groups as only NCCL can
    return init_device_mesh(device_type, (data, *config.mesh_shape), mesh_dim_names=("data", "ring", "ulysses"))


def as_ring(
    groups: MeshGroups,
    group: dist.ProcessGroup | None,
    size: int,
    rank: int,
    *,
    name: str,
    shares: Shares | None = None,
) -> MeshGroups:
    """Build groups that use `group` both as ring and as context group."""
    place: dict[str, Any] = {"ring": group, "ulysses": None, "context": group, "context_rank": rank}
    place |= {"row": None, "column": None, "columns": 1}
    name = f"{groups.name}:{name}{size}"
    ring = replace(groups, name=name, context_shape=(size, 1), shares=shares, memo={}, compared=set(), **place)
    _by_name[name] = ring
    return ring


def _build_groups(mesh: DeviceMesh) -> MeshGroups:
    names = _axis_names(mesh)
    ring, ulysses = mesh.size(names.index("ring")), mesh.size(names.index("ulysses"))
    ranks = _context_ranks(mesh)
    if bool((ranks.diff(dim=1) <= 0).any()):  # process groups are in the order of ranks
        raise ValueError(
            f"mesh {dict(zip(names, mesh.shape, strict=True))}: the ranks of a context group must ascend, with ring "
            f"outside ulysses, but are {ranks.tolist()}: build the mesh with ring before ulysses and ascending ranks"
        )
    coordinates = (ranks == dist.get_rank()).nonzero()
    if not len(coordinates):
        raise ValueError(
            f"mesh {dict(zip(names, mesh.shape, strict=True))} does not contain this rank, {dist.get_rank()}: every "
            "rank must be in the mesh"
        )
    data_rank, context_rank = coordinates[0].tolist()
    context = None
    if ring * ulysses > 1:
        if ring == 1:
            context = mesh.get_group("ulysses")
        elif ulysses == 1:
            context = mesh.get_group("ring")
        else:  # collective: every rank creates the groups of all rows in the same order
            context, _ = dist.new_subgroups_by_enumeration(ranks.tolist())  # type: ignore[no-untyped-call]
    ring_group = mesh.get_group("ring") if ring > 1 else None
    ulysses_group = mesh.get_group("ulysses") if ulysses > 1 else None
    connect(ring_group, ulysses_group, context)
    return MeshGroups(
        name=f"{context.group_name if context is not None else 'single'}:{ring}x{ulysses}:{next(_numbers)}",
        mesh=mesh,
        ring=ring_group,
        ulysses=ulysses_group,
        context=context,
        context_shape=(ring, ulysses),
        context_rank=context_rank,
        data_rank=data_rank,
        data_size=len(ranks),
    )


def first_ranks(groups: MeshGroups) -> list[int]:
    """Return the first rank of each context group, in data-rank order."""
    ranks: list[int] = [0] if groups.mesh is None else _context_ranks(groups.mesh)[:, 0].tolist()
    return ranks


def _context_ranks(mesh: DeviceMesh) -> torch.Tensor:
    """Return the ranks of each context group [data, ring * ulysses], ring-major."""
    names = _axis_names(mesh)
    inner = [names.index("ring"), names.index("ulysses")]
    others = [axis for axis in range(mesh.ndim) if axis not in inner]
    return mesh.mesh.permute(*others, *inner).reshape(-1, mesh.size(inner[0]) * mesh.size(inner[1]))


def _axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None, "ContextParallelConfig rejects a mesh without names"
    return mesh.mesh_dim_names


def connect(*groups: dist.ProcessGroup | None) -> None:
    """Run one collective on each NCCL group, so that its communicator exists before the first point-to-point transfer.

    If the first call on a group is a batch of point-to-point operations, every rank must take part in it. A rank with
    an empty shard, next to an empty shard, has nothing to send or receive, and the other ranks would hang.
    """
    for group in dict.fromkeys(groups):
        if group is not None and cuda_backend_is("nccl", group):
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
