"""Common part of the strategies: settings, the mesh and its context degrees, selected modules, shards of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fnmatch import fnmatch
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp.comm.shards import gather_uneven, own_shard
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.config import ContextParallelConfig
from lightning_cp.data.keyed_random import hashed_seed
from lightning_cp.engine.apply import Installed, installed_on, no_plan_message, parallelize
from lightning_cp.engine.paths import class_of
from lightning_cp.engine.session import Session
from lightning_cp.errors import PlanError
from lightning_cp.kernels import check_kernel, choose_kernel
from lightning_cp.launch.stall import watch_stalls
from lightning_cp.mesh.degrees import AUTO, context_shape, show_shares
from lightning_cp.mesh.groups import MeshGroups, groups_for
from lightning_cp.plans import Plan, plan_for, refusal, registered_plan
from lightning_cp.strategies.settings import StrategySettings


@dataclass
class ContextParallel:
    """Context-parallel part of a strategy: builds the groups once ranks are started, and installs plans.

    Attributes:
        settings: settings of the strategy.
        groups: process groups of the mesh; None before the ranks are started.
        described: lines that were logged.
        matched: keys of `plans` and `modules` that matched a module.
        sessions: sessions of the transformers.
        built: settings and groups by context degree; the largest is ring x ulysses. A smaller context group has
            neighbouring ranks of a larger one, so ranks that share a sample at any degree also share the random state
            and the inputs of the largest degree.
        degree, step_groups: context degree and groups of the current step, see `use_degree`.
    """

    settings: StrategySettings
    groups: MeshGroups | None = field(default=None, init=False)
    described: set[str] = field(default_factory=set, init=False)
    matched: set[Any] = field(default_factory=set, init=False)
    sessions: WeakSet[Session] = field(default_factory=WeakSet, init=False)
    built: dict[int, tuple[ContextParallelConfig, MeshGroups]] = field(default_factory=dict, init=False)
    degree: int | None = field(default=None, init=False)
    step_groups: MeshGroups | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_kernel(self.settings.kernel)
        self.config = self.settings.config
        self.ring, self.ulysses = self.config.mesh_shape

    def __getstate__(self) -> dict[str, Any]:
        """Drop the sessions of this process's models: a spawned rank builds its own."""
        return {name: value for name, value in self.__dict__.items() if name != "sessions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, sessions=WeakSet())

    @property
    def size(self) -> int:
        """Number of ranks that share one sample."""
        return self.ring * self.ulysses

    def check_world(self, world: int) -> None:
        """Check the world size. Raises: ValueError: it is not data_parallel x ring x ulysses."""
        if self.settings.degrees == AUTO:
            return  # nothing is chosen yet
        if world % self.size or world < self.size:
            raise ValueError(
                f"ring={self.ring} x ulysses={self.ulysses} = {self.size} must divide the world size {world}: start a "
                f"multiple of {self.size} ranks (for instance devices={self.size}), or lower a degree"
            )
        data = self.settings.data_parallel
        if data != "auto" and world != int(data) * self.size:
            raise ValueError(
                f"data_parallel={data} x ring={self.ring} x ulysses={self.ulysses} = {int(data) * self.size} must "
                f"equal the world size {world}: leave data_parallel='auto' ({world // self.size} here), or start that "
                "many ranks"
            )

    def set_up(self) -> MeshGroups:
        """Build the process groups of every context degree. Ranks: the whole world."""
        self.groups = self.step_groups = groups_for(self.config, self.settings.shares)
        assert not isinstance(self.settings.degrees, str), '"auto" is replaced before'
        ring, ulysses = self.groups.context_shape
        self.built = {self.groups.context_size: (self.config, self.groups)}
        for degree in sorted({*(self.settings.degrees or {}).values()} - self.built.keys()):
            shape = context_shape(degree, ring=ring, ulysses=ulysses)
            smaller = replace(self.config, ring_degree=shape[0], ulysses_degree=shape[1], grid=None)
            self.built[degree] = smaller, groups_for(smaller)
        return self.groups

    def use_degree(self, degree: int | None) -> None:
        """Compute the following forwards in context groups of `degree` ranks; None: the largest degree.

        Ranks: the whole world. Raises: ValueError: no groups were built for this degree.
        """
        self.initialized_groups()
        chosen = max(self.built) if degree is None else degree
        if chosen not in self.built:
            raise ValueError(f"degree={degree} must be one of {sorted(self.built)}: add it to the strategy's `degrees`")
        config, self.step_groups = self.built[chosen]
        for session in self.sessions:
            session.use(config, self.step_groups)
        self.degree = degree

    def watch(self, *, timeout: timedelta | None) -> None:
        """Report stalled collectives. Args: timeout: time-out of collectives."""
        if self.settings.stall_s is not None and dist.is_initialized():
            timeout_s = math.inf if timeout is None else timeout.total_seconds()
            watch_stalls(after_s=self.settings.stall_s, timeout_s=timeout_s)

    def initialized_groups(self, *, of_step: bool = False) -> MeshGroups:
        """Return the groups, or those of the current step. Raises: RuntimeError: they are not initialized yet."""
        if of_step and self.step_groups is not None:
            return self.step_groups
        if self.groups is None:
            raise RuntimeError(
                "the process groups are not initialized yet: call fabric.launch() or trainer.fit() first"
            )
        return self.groups

    def wrap(self, module: nn.Module) -> list[Installed]:
        """Make every selected transformer in `module` context-parallel. Returns: all, also those wrapped before."""
        selected = self.selected(module)
        if selected:
            self.initialized_groups()
        settings = {name: getattr(self.settings, name) for name in ("kernel", "check_peers", "shares", "mlp_tiles")}
        installed = [
            installed_on(inner) or parallelize(inner, self.config, plan, **settings) for inner, plan in selected
        ]
        self.sessions.update(one.session for one in installed)
        if self.degree is not None and installed:
            self.use_degree(self.degree)
        return installed

    def finish_checks(self, *, within_s: float = 1.0) -> None:
        """Raise the differences found by background comparisons of each transformer's last forward.

        Args: within_s: seconds to wait; unfinished comparisons are dropped.
        Raises: PeerMismatchError: context peers were given different data, on all ranks of the context group.
        """
        for session in list(self.sessions):  # a check is finished before its session gets another one
            session.peers.finish(within_s=within_s)

    def selected(self, module: nn.Module) -> list[tuple[nn.Module, object]]:
        """Return the transformers of `module` to make context-parallel, with their plans; None: installed before.

        Raises: PlanError: a key of `plans` or `modules` matches nothing, or a transformer has no plan.
        """
        inside = list(module.named_modules())
        for setting, keys in (("plans", self.settings.plans or {}), ("modules", self.settings.modules or ())):
            self.matched |= {key for key in keys if any(_names(key, name, inner) for name, inner in inside)}
            absent = [key for key in keys if key not in self.matched]  # neither here nor in a module wrapped earlier
            if absent:
                transformers = sorted(
                    {kind.__name__ for kind in map(class_of, module.modules()) if registered_plan(kind)}
                )
                raise PlanError(
                    f"{setting}: there is no {absent[0]!r} in {type(module).__name__}; a key is a class, its name, or "
                    f"the path of a module (transformers with a plan in there: {transformers or 'none'})"
                )
        selected = []
        for name, inner in inside:
            if self.settings.modules is not None and not any(_names(key, name, inner) for key in self.settings.modules):
                continue
            plan = self._plan(name, inner)
            if plan is not None or installed_on(inner) is not None:
                selected.append((inner, plan))
            elif self.settings.modules is not None:
                raise PlanError(f"modules={self.settings.modules!r} names {name!r}: {no_plan_message(class_of(inner))}")
        if not selected and self.settings.modules is None and self.size > 1:  # each rank would run the full sequence
            for kind in map(class_of, module.modules()):
                if refusal(kind) is not None:
                    raise PlanError(no_plan_message(kind))
        return selected

    def _plan(self, name: str, module: nn.Module) -> object:
        chosen = [plan for key, plan in (self.settings.plans or {}).items() if _names(key, name, module)]
        return chosen[0] if chosen else plan_for(module)

    def unused_parameters(self, module: nn.Module) -> bool:
        """Return whether trained parameters get no gradient, always or in some steps.

        These are parameters that the plan of a selected transformer names, and those of a module that runs a part of
        itself in some steps: one of its children in each forward (it has the attribute `runs_one_child`), several
        transformers that train, or a LightningModule with manual optimization, in which each backward may use a part.
        """
        selected = self.selected(module)
        trained = [inner for inner, _ in selected if any(x.requires_grad for x in inner.parameters())]
        if len(trained) > 1 or not getattr(module, "automatic_optimization", True):
            return True
        if any(getattr(inner, "runs_one_child", False) for inner in module.modules()):
            return True
        return any(
            parameter.requires_grad and any(fnmatch(name, pattern.replace(".-1.", ".*.")) for pattern in plan.unused)
            for inner, plan in selected
            if isinstance(plan, Plan)
            for name, parameter in inner.named_parameters()
        )

    def describe(self, installed: Sequence[Installed], *, ranks_per_node: int) -> str | None:
        """Describe the layout in one line; None if already described. Call it under the precision of the forward."""
        if self.groups is None and not installed:
            return None  # no process group and no transformer
        groups = self.initialized_groups()
        world = groups.data_size * groups.context_size
        line = f"{world} ranks = data {groups.data_size} × ring {self.ring} × ulysses {self.ulysses}"
        line += show_shares(groups.shares)
        for one in installed:
            blocks = sum(len(rule.paths) for rule in one.model_plan.arguments if rule.is_block)
            line += f"; {class_of(one.module).__name__}: {blocks} blocks, kernel {self._kernel_of(one.module)}"
        if not installed and self.size > 1:
            line += (
                "; no transformer with a plan: only calls of context_parallel_attention are parallel (docs/plans.md)"
            )
        if groups.ulysses is not None:
            nodes = {rank // ranks_per_node for rank in dist.get_process_group_ranks(groups.ulysses)}
            if len(nodes) > 1:
                line += (
                    f"; ulysses={self.ulysses} spans {len(nodes)} nodes of {ranks_per_node} ranks: Ulysses within a "
                    "node and ring across nodes would be faster"
                )
        if line in self.described:
            return None
        self.described.add(line)
        return line

    def _kernel_of(self, module: nn.Module) -> str:
        """Return the kernel that is chosen for this device and precision without a mask."""
        if self.settings.kernel != "auto":
            return self.settings.kernel
        parameters = list(module.parameters())  # frozen ones may wait in host memory, see `Experts`
        parameter = next((x for x in parameters if x.device.type != "cpu"), parameters[0])
        device, dtype = parameter.device, parameter.dtype
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        return choose_kernel("auto", torch.empty(1, 1, 1, 64, device=device, dtype=dtype), None).name


class ShardsBatches:
    """Base of the strategies: shards of batches, and random numbers, for the ranks that share a sample.

    At another degree (`use_degree`) these are other ranks.
    """

    context: ContextParallel

    def shard(self, batch: Any, dims: Mapping[str, int], order: Tensor | None = None) -> Any:
        """Return this rank's shard of the named tensors of a (nested) batch; other tensors stay whole.

        Args:
            dims: dim to shard, by tensor name. Names are dict keys, at any depth.
            order: position of the token at each place of the shards, int [tokens], such as a `balanced_order`; None:
                ascending. The same on all ranks of the context group.
        Gradient: a slice; backward pads with zeros.
        Raises: ValueError: a name that is not in the batch, or `order` does not hold each position once.
        """
        seen, groups = set[str](), self.context.initialized_groups(of_step=True)
        result = _sharded(batch, dims, None, seen, lambda x, dim: own_shard(x, dim, groups, order))
        absent = [name for name in dims if name not in seen]
        if absent:
            raise ValueError(f"dims={dict(dims)} names {absent[0]!r}, which is not in the batch")
        return result

    def gather(self, x: Tensor, dim: int, order: Tensor | None = None) -> Tensor:
        """All-gather a sharded tensor; shards may be uneven.

        Args: order: the order that `shard` got, to undo it; None: keep the order of the shards.
        Ranks: the whole context group. Gradient: reduce-scatter (sum), the true adjoint.
        """
        return gather_uneven(x, dim, self.context.initialized_groups(of_step=True), order)

    def generator(self, seed: int, device: Any = "cpu") -> torch.Generator:
        """Create a generator that draws the same numbers on all ranks of a context group.

        Use it for noise, timesteps and condition dropout. Each context group gets different numbers. Draw whole
        samples, then shard them. Raises: RuntimeError: the process groups are not initialized yet.
        """
        groups = self.context.initialized_groups(of_step=True)
        return torch.Generator(device).manual_seed(hashed_seed(f"{seed}/{groups.data_rank}"))

    def local_mean(self, loss: Tensor, tokens: int) -> Tensor:
        """Weight a mean loss over local tokens, so that averaged gradients are those of the mean over all tokens.

        Args:
            loss: mean over the local tokens, a scalar; any value, even nan, if there are none.
            tokens: number of local tokens; may differ between the ranks of a context group.
        Returns: loss x context size x tokens / tokens of the context group.
        Ranks: the whole context group. Source: gradients are averaged over all ranks (see docs).
        """
        groups = self.context.initialized_groups(of_step=True)
        if groups.context is None:
            return loss
        counts = [n for (n,) in all_gather_ints([int(tokens)], group=groups.context)]
        if not sum(counts):
            raise ValueError("tokens=0 on every rank of the context group: local_mean needs at least one token")
        weight = groups.context_size * counts[groups.context_rank] / sum(counts)
        return loss * weight if tokens else torch.nan_to_num(loss, nan=0.0) * 0.0


def _sharded(
    value: Any, dims: Mapping[str, int], dim: int | None, seen: set[str], cut: Callable[[Tensor, int], Tensor]
) -> Any:
    if isinstance(value, Mapping):
        seen |= dims.keys() & value.keys()
        return {name: _sharded(x, dims, dims.get(name, dim), seen, cut) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_sharded(x, dims, dim, seen, cut) for x in value]
        return items if isinstance(value, list) else tuple(items)
    return value if dim is None or not isinstance(value, Tensor) else cut(value, dim)


def _names(key: Any, path: str, module: nn.Module) -> bool:
    """Return whether a key of `plans` or `modules` (class, its name with or without module, path) matches `module`."""
    if isinstance(key, type):
        return isinstance(module, key)
    kind = class_of(module)
    return key in (path or None, kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
