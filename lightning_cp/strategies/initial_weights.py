"""Start training from the weights of rank 0 on every rank; replace the parameters of optimizers by sharded ones."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_cp.comm.agree import gather_objects
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.engine.meta import deferred_loads, materialize
from lightning_cp.engine.peers.checksum import checksum, digest_ints, plain_tensors
from lightning_cp.training.ema import copy_full_tensor

_log = logging.getLogger("lightning.fabric.strategies.context_parallel")  # child of a logger with a handler


@dataclass(frozen=True)
class _Entry:
    """Description of one parameter or buffer on one rank. `state`: "values", "meta" or "sharded"."""

    name: str
    kind: str  # shape, dtype, whether it trains
    state: str
    checksum: int


@dataclass
class MissingWeights:
    """Weights that have values on rank 0 and are on the meta device on another rank.

    Attributes:
        names: names of these weights, the same on all ranks; a tied weight is listed under all its names.
        first_names: one name per weight, in send order.
        values: rank 0's values by name; empty on other ranks.
    """

    names: frozenset[str] = frozenset()
    first_names: tuple[str, ...] = ()
    values: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def send(self, module: nn.Module, device: torch.device) -> None:
        """Broadcast rank 0's values, one tensor at a time. All ranks must have allocated storage before.

        Args:
            module: module with whole or sharded (DTensor) weights; each rank keeps its shard of a received tensor.
            device: device of the collectives.
        Ranks: the whole world. Raises: ValueError: a weight was renamed since the comparison.
        """
        targets = dict(_named_tensors(module))
        for name in self.first_names:
            if name not in targets:
                raise ValueError(
                    f"{name} cannot be sent from rank 0, because it is no longer a weight of {type(module).__name__}: "
                    "keep the names of weights in parallelize_fn, or load the weights on every rank"
                )
            target = targets[name]
            value = self.values.pop(name, None)
            full = torch.empty(target.shape, dtype=target.dtype, device=device) if value is None else value
            copy_full_tensor(_broadcast(full, device), target)


@contextmanager
def equal_initial_weights(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Copy rank 0's weights to every rank, and allocate weights on the meta device; shard the module inside.

    Weights that all ranks hold are compared and sent on entry. Weights that only rank 0 holds are sent on exit; each
    rank keeps its shard, so that no other rank ever holds the whole module. Weights that no rank holds are loaded
    (see `load_when_allocated`) or initialised on exit, equally on all ranks that hold the same shard.

    Args:
        module: has the same parameters and buffers on every rank; each has values on rank 0, or is on the meta device
            on all ranks.
        device: device of the storage and of the collectives.
    Ranks: the whole world. Raises: ValueError: see `share_initial_weights`.
    """
    missing = share_initial_weights(module, device)
    deferred = deferred_loads(module, excluded=missing.names)
    uninitialized = any(x.is_meta and name not in missing.names for name, x in _named_tensors(module))
    sharded = any(isinstance(x, DTensor) for _, x in _named_tensors(module))
    yield
    materialize(module, device, sent=missing.names | deferred.names)
    missing.send(module, device)
    deferred.run()
    if uninitialized:
        share_initial_weights(module, device)
    if uninitialized or sharded:
        share_replicas(module)


def share_initial_weights(module: nn.Module, device: torch.device) -> MissingWeights:
    """Compare all parameters and buffers between ranks, and broadcast rank 0's where they differ.

    Equal weights cost one all-gather of three integers. Otherwise the tensors that differ are broadcast one by one, in
    place, so that at most one more tensor is in memory. Two kinds of tensors are skipped: DTensors (see
    `share_replicas`) and those that DDP ignores (`_ddp_params_and_buffers_to_ignore`).

    Args:
        module: has the same parameters and buffers on every rank, on the meta device or not.
        device: device of the collectives.
    Returns: weights to send after the ranks that lack them have allocated storage.
    Ranks: the whole world.
    Raises: ValueError: on every rank: the ranks hold different modules, or a weight has values on other ranks but not
        on rank 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return MissingWeights()
    tensors = compared_tensors(module)
    local_entries = [_describe(name, x, device) for name, x in tensors.items()]
    if _all_equal(local_entries):
        return MissingWeights()
    by_rank = [{entry.name: entry for entry in entries} for entries in gather_objects(local_entries, dist.group.WORLD)]
    _check_same_module(by_rank, type(module).__name__)
    differ, missing = [], []
    for name in by_rank[0]:
        entries = [entries[name] for entries in by_rank]
        if len({entry.state for entry in entries}) > 1:
            missing.append(name)
        elif len({entry.checksum for entry in entries}) > 1:
            differ.append(name)
    for name in differ:
        copy_full_tensor(_broadcast(tensors[name].detach(), device), tensors[name])
    if differ or missing:
        rank_zero_only(_log.info)(
            f"{type(module).__name__}: {len(differ) + len(missing)} of {len(local_entries)} initial weights and "
            "buffers differ between ranks; every rank starts from rank 0's"
        )
    values = {name: tensors[name].detach() for name in missing} if dist.get_rank() == 0 else {}
    missing_ids = {id(tensors[name]) for name in missing}
    return MissingWeights(
        frozenset(n for n, x in _named_tensors(module) if id(x) in missing_ids), tuple(missing), values
    )


@torch.no_grad()
def share_replicas(module: nn.Module) -> None:
    """Broadcast sharded weights (DTensors) along their replicated mesh dims, from the first rank of each dim.

    Ranks: all ranks of the DTensors' meshes.
    """
    for _, x in _distinct_tensors(module):
        if isinstance(x, DTensor):
            for dim, placement in enumerate(x.placements):
                if isinstance(placement, Replicate) and x.device_mesh.size(dim) > 1:
                    local = x.to_local()
                    values = local.contiguous()
                    dist.broadcast(values, group=x.device_mesh.get_group(dim), group_src=0)
                    local.copy_(values)


def move_values(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to a device; those on the meta device stay there."""
    module._apply(lambda x: x if x.is_meta else x.to(device))  # type: ignore[no-untyped-call]


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def compared_tensors(module: nn.Module, *, buffers: bool = True) -> dict[str, Tensor]:
    """Return every parameter and buffer once, by name, without those that DDP ignores."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return {name: x for name, x in _distinct_tensors(module, buffers=buffers) if name not in ignored}


def _distinct_tensors(module: nn.Module, *, buffers: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer once; for a quantised tensor, the plain tensors inside it."""
    seen: set[int] = set()
    for name, x in _named_tensors(module) if buffers else module.named_parameters():
        if id(x) not in seen and not is_lazy(x):
            seen.add(id(x))
            yield from plain_tensors(name, x)


def _describe(name: str, x: Tensor, device: torch.device) -> _Entry:
    """Describe a tensor. Its checksum is computed on `device`: a GPU is much faster, also with the copy."""
    kind = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}{' trained' if x.requires_grad else ''}"
    if isinstance(x, DTensor) or x.layout != torch.strided:
        return _Entry(name, kind, "sharded", 0)
    return _Entry(name, kind, "meta", 0) if x.is_meta else _Entry(name, kind, "values", checksum(x.to(device)))


def _all_equal(entries: list[_Entry]) -> bool:
    """Return whether every rank has the same entries. Synchronises the host."""
    numbers = digest_ints(entries)
    assert dist.group.WORLD is not None, "the caller has checked that there is a process group"
    return all(other == numbers for other in all_gather_ints(numbers, group=dist.group.WORLD))


def _check_same_module(by_rank: list[dict[str, _Entry]], module: str) -> None:
    """Check that all ranks have the same module. Raises: ValueError: see `share_initial_weights`."""
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        for name in dict.fromkeys([*first, *other]):
            kinds = [entries[name].kind if name in entries else "no such weight" for entries in (first, other)]
            if kinds[0] != kinds[1]:
                raise ValueError(
                    f"{module}: the ranks hold different modules: {name} is {kinds[0]} on rank 0 and {kinds[1]} on "
                    f"rank {rank}. Build the same module, and freeze the same weights, on every rank"
                )
            here, there = first[name].state, other[name].state
            if here != there and (here, there) != ("values", "meta"):
                raise ValueError(
                    f"{module}: {name} is {_STATES[here]} on rank 0 and {_STATES[there]} on rank {rank}. Load the "
                    "weights on rank 0 or on every rank, and shard a module on every rank or on none"
                )


_STATES = {"values": "initialised", "meta": "on the meta device", "sharded": "sharded"}


def _broadcast(x: Tensor, device: torch.device) -> Tensor:
    """Broadcast rank 0's values of a whole tensor, on `device`."""
    values = x.detach().to(device).contiguous()
    dist.broadcast(values, src=0)
    return values


class ReplacedWeights:
    """Map from replaced parameters to the new ones."""

    def __init__(self) -> None:
        # Key: id of the replaced parameter. The weak reference detects an id that was reused by another object.
        self._replaced: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    @contextmanager
    def recording(self, module: nn.Module) -> Iterator[None]:
        """Record which parameters of `module` are replaced inside the context, by name."""
        before = dict(module.named_parameters())
        yield
        for name, parameter in module.named_parameters():
            if before.get(name, parameter) is not parameter:
                self._replaced[id(before[name])] = (weakref.ref(before[name]), parameter)

    def update(self, optimizer: Optimizer) -> None:
        """Replace parameters in an optimizer that was created before setup.

        Raises: ValueError: the optimizer already has state for one of them.
        """
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                old, new = self._replaced.get(id(parameter), (None, None))
                if old is None or old() is not parameter:
                    continue
                if parameter in optimizer.state:
                    raise ValueError(
                        f"{type(optimizer).__name__} already has state for weights that setup has just replaced: call "
                        "fabric.setup before its first step, or load its state after fabric.setup. An optimizer that "
                        "has state from the start, such as Adagrad, is created after fabric.setup_module"
                    )
                group["params"][i] = new
