"""Find weights that were loaded on some ranks only, between set-up and the first backward."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_cp.comm.agree import gather_objects
from lightning_cp.engine.peers.checksum import checksum
from lightning_cp.engine.rules.paths import class_of
from lightning_cp.strategies.weights.initial import compared_tensors


class LateWeights:
    """Check the weights of modules in the next backward. Pickling drops the modules."""

    def __init__(self) -> None:
        self._modules: WeakKeyDictionary[nn.Module, _WeightsAtSetup] = WeakKeyDictionary()
        self._added = 0  # set-ups since the last check

    def add(self, module: nn.Module) -> None:
        """Add a module after its weights were compared, sent and sharded. Ranks: the whole world."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._modules[module] = _WeightsAtSetup(module, self._added)
            self._added += 1

    def check(self) -> None:
        """Check and forget all modules, with one collective if there were any.

        Ranks: the whole world. Raises: ValueError: on every rank, if whole weights differ between ranks, or if some
            ranks have changed sharded weights since set-up and others have changed none.
        """
        if not self._added:
            return
        states = [weights.now() for weights in self._modules.values()]
        self._modules.clear()
        self._added = 0
        gathered = gather_objects(states, dist.group.WORLD)
        by_rank: list[dict[int, _Now]] = [
            {now.number: now for now in one} for one in gathered
        ]  # a rank may have freed a module earlier
        for number, first in by_rank[0].items():
            _compare(first.name, {rank: one[number] for rank, one in enumerate(by_rank) if number in one})

    @override
    def __reduce__(self) -> tuple[type[LateWeights], tuple[()]]:
        return type(self), ()


@dataclass(frozen=True)
class _Now:
    """State of the weights of one module on one rank.

    Attributes:
        number: number of the set-up. name: class of the module.
        sums: checksums of whole weights. changed: a sharded weight that has changed since set-up, or None.
    """

    number: int
    name: str
    sums: dict[str, int]
    changed: str | None


@dataclass(frozen=True)
class _Shard:
    """A sharded weight as it was at set-up."""

    weight: DTensor
    version: int
    checksum: int

    @classmethod
    def of(cls, weight: DTensor) -> _Shard:
        # The version detects operations on the whole weight, also on ranks where they leave the shard as it was. The
        # checksum detects operations on the shard or its `.data`.
        return cls(weight, weight._version, checksum(weight.to_local().detach()))

    def has_changed(self) -> bool:
        now = _Shard.of(self.weight)
        return (now.version, now.checksum) != (self.version, self.checksum)


class _WeightsAtSetup:
    """The parameters of a module that was just set up: equal on all ranks, or sharded.

    It keeps the parameters, because FSDP2 replaces sharded ones by whole ones between a forward and its backward.
    """

    def __init__(self, module: nn.Module, number: int) -> None:
        tensors = compared_tensors(module, buffers=False)
        self._number, self._name = number, class_of(module).__name__
        self._whole = {name: x for name, x in tensors.items() if not isinstance(x, DTensor)}
        self._shards = {name: _Shard.of(x) for name, x in tensors.items() if isinstance(x, DTensor)}

    @torch.no_grad()
    def now(self) -> _Now:
        sums = {name: checksum(x) for name, x in self._whole.items() if not x.is_meta and x.layout == torch.strided}
        changed = next((name for name, x in self._shards.items() if x.has_changed()), None)
        return _Now(self._number, self._name, sums, changed)


def _compare(module: str, by_rank: dict[int, _Now]) -> None:
    """Compare one module between ranks. Raises: ValueError: see `LateWeights.check`."""
    difference = ""
    for rank, other in by_rank.items():
        differ = [name for name, first in by_rank[0].sums.items() if other.sums.get(name, first) != first]
        difference = difference or (f"{differ[0]} on rank {rank} differs from rank 0's" if differ else "")
    loaded = {rank: now.changed for rank, now in by_rank.items() if now.changed is not None}
    others = [rank for rank in by_rank if rank not in loaded]
    if loaded and others:
        rank, name = next(iter(loaded.items()))
        difference = (
            difference or f"{name}, which is sharded, was changed on rank {rank}, and nothing was on rank {others[0]}"
        )
    if difference:
        raise ValueError(
            f"weights of {module} were loaded on some ranks only, after set-up: {difference}. Load them before set-up "
            "(on one rank or on all), or on every rank (for sharded weights, set_model_state_dict of "
            "torch.distributed.checkpoint.state_dict with broadcast_from_rank0=True)"
        )
