"""What must be equal on all ranks, because gradients are averaged: weights, what trains, optimizers, Hydra's job."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.comm.agree import first_difference, gather_objects
from lightning_cp.comm.background import BackgroundGather, gather_device, gather_in_background
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.engine.attention.stand_ins import weight_of
from lightning_cp.engine.paths import class_of
from lightning_cp.engine.peers.checksum import checksum, checksum_on_device, version_of
from lightning_cp.errors import PeerMismatchError
from lightning_cp.launch.rendezvous import job_id
from lightning_cp.mesh.sample_groups import world_control
from lightning_cp.strategies.gradients import shards_of
from lightning_cp.strategies.initial_weights import compared_tensors
from lightning_cp.strategies.settings import StrategySettings
from lightning_cp.strategies.sweep_ranks import job_overrides

Facts = Mapping[str, str]  # by name, in words
Adapt = Callable[[nn.Module], None]  # adapts a wrapper to what trains now
_KIND = attrgetter("requires_grad", "dtype")
_STORAGE: Callable[[Any], Any] = StorageWeakRef
_SHARD = "of shard "  # in the names of weights that some ranks hold
_EVERY = 8  # backwards between two looks at optimizers, and at replicated weights
_JOBS = (
    "{}; all ranks must run the same job, so two jobs must not use one MASTER_PORT, and a sweeper that draws values "
    "must not run on each rank: let the strategy start the ranks, or start one job at a time"
)
_SETTINGS = "{}; all ranks must create the strategy with equal settings: give all ranks the same value"
_TRAINED = "{}: cast, replace, freeze and unfreeze the same weights, on every rank, before the same step"
_LOADED = (
    "weights were loaded on some ranks only, after set-up: {}. Load them before set-up (on one rank or on all), or on "
    "every rank (for sharded weights, set_model_state_dict of torch.distributed.checkpoint.state_dict with "
    "broadcast_from_rank0=True); draw new weights with the same seed on every rank"
)
_DRAWN = (
    "weights have changed in another way than on other ranks: {}. A hook that draws into weights must draw the same "
    "numbers on every rank: from a torch.Generator with a fixed seed, or on rank 0, followed by strategy.broadcast"
)
_INPUTS = "{}: all ranks must call strategy.grad together, with the same weights in the same order"
_OPTIMIZERS = "{}; weights are averaged over all ranks, so all must use the same settings"


def compare_jobs(strategy: object, settings: StrategySettings) -> None:
    """Check that all ranks run the same job, with the same strategy, before they build groups.

    Two jobs may have met at one port, or a sweeper may run on each rank.
    Ranks: the whole world. Raises: PeerMismatchError: on all ranks.
    """
    facts = {"id of the job": job_id(), "overrides of the Hydra job": " ".join(job_overrides())}
    _compare(PeerMismatchError, _JOBS, facts)
    plain = {name: repr(x) for name, x in vars(settings).items() if _is_plain(x)}
    _compare(PeerMismatchError, _SETTINGS, {"strategy": type(strategy).__name__, **plain})


class Agreement:
    """Compares named facts between ranks before each backward that averages gradients.

    The hosts exchange a checksum of what has changed since the last backward, and words only if it differs: the error
    is raised on all ranks. Every 8th backward also compares optimizers and, in the background, the weights that have
    changed; a difference is raised in the backward after. Pickling drops what is compared.
    """

    def __init__(self) -> None:
        self._loaded: WeakKeyDictionary[nn.Module, _WeightsAtSetup] = WeakKeyDictionary()  # since the last backward
        self._wrappers: WeakKeyDictionary[nn.Module, _Trained] = WeakKeyDictionary()
        self._optimizers: list[weakref.ref[Any]] = []
        self._backwards = 0
        self._sums: BackgroundGather | None = None

    def add_weights(self, module: nn.Module) -> None:
        """Compare the weights of a module in the next backward: those of set-up are equal. Ranks: the whole world."""
        if _has_peers():
            self._loaded[module] = _WeightsAtSetup(module)

    def add_wrapper(self, wrapper: nn.Module, adapt: Adapt) -> None:
        """Compare the trained parameters of a DDP module or a sharded module with those at set-up.

        Args: adapt: called on all ranks if they have all changed in the same way. Raises ValueError if it cannot.
        Ranks: the whole world.
        """
        self._wrappers[wrapper] = _Trained(wrapper, adapt)
        if _has_peers():
            world_control("agreement")

    def wrappers(self) -> list[nn.Module]:
        """Return the DDP modules and sharded modules."""
        return list(self._wrappers)

    def add_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Compare optimizers now, and in every 8th backward. Ranks: the whole world. Raises: PeerMismatchError."""
        number = {"number of optimizers": str(len(optimizers))}
        _compare(PeerMismatchError, _OPTIMIZERS, {**number, **_settings(optimizers)})
        self._optimizers = [one for one in self._optimizers if one() is not None] + list(map(weakref.ref, optimizers))

    def before_backward(self, loss: Any, *, optimizers: bool, weights: bool) -> None:
        """Compare everything. Synchronises the hosts, but not with their GPUs.

        Args: optimizers, weights: also look at them in every 8th backward.
        Ranks: the whole world. Raises: ValueError, PeerMismatchError: on every rank.
        """
        averaged = [x for x in self._wrappers if getattr(x, "require_backward_grad_sync", True)]  # not in `no_sync`
        if not _has_peers() or not (averaged or self._loaded):
            return
        self._read_sums()
        self._backwards += 1
        looks = self._backwards % _EVERY == 0
        changed = {x: self._wrappers[x] for x in averaged if self._wrappers[x].has_changed(x)}
        # A weight that was cast and cast back, or loaded again, has the same words as before.
        call = {"the call": "a backward"}
        state = {
            "what trains": "changed" if changed else "as before",
            "the loss": "has a graph" if getattr(loss, "requires_grad", True) else "has no graph",
        }
        facts = [
            {**call, **_joined(one.facts(x) for x, one in changed.items()), **state},
            _joined(at_setup.facts(module) for module, at_setup in self._loaded.items()),
            _settings([one for ref in self._optimizers if (one := ref())]) if looks and optimizers else {},
        ]
        self._loaded.clear()
        sums = [zlib.crc32(repr(sorted(_plain(one).items())).encode()) for one in facts]
        by_rank = all_gather_ints(sums, group=world_control("agreement"))
        if any(ints != by_rank[0] for ints in by_rank):
            _compare(ValueError, _TRAINED, {**call, **_joined(self._wrappers[x].facts(x) for x in averaged), **state})
            _compare(ValueError, _LOADED, facts[1])
            _compare(PeerMismatchError, _OPTIMIZERS, facts[2])
        for x, one in changed.items():
            one.adapt(x)
        if looks and weights:
            self._start_sums(averaged)

    def before_grad(self, inputs: Sequence[Any]) -> None:
        """Compare which weights are the inputs of `strategy.grad`. Ranks: the whole world. Raises: ValueError."""
        if not _has_peers():
            return
        names: dict[int, str] = {}
        for one in self._wrappers:
            shards = shards_of(one)
            names |= {id(shards.get(id(x), x)): name for name, x in _inner(one).named_parameters()}
        facts = {"the call": "strategy.grad", "the number of inputs": str(len(inputs))}
        facts |= {f"input {i}": names.get(id(weight_of(x)), "a tensor") for i, x in enumerate(inputs)}
        sums = [zlib.crc32(repr(facts).encode()), 0, 0]  # as many as before a backward
        if len(set(map(tuple, all_gather_ints(sums, group=world_control("agreement"))))) > 1:
            _compare(ValueError, _INPUTS, facts)

    def _start_sums(self, averaged: Sequence[nn.Module]) -> None:
        world = dist.group.WORLD
        assert world is not None, "there are peers"
        changed = [pair for x in averaged for pair in self._wrappers[x].changed_replicas(x)]
        values = []
        for sharded in (False, True):
            total = torch.zeros((), dtype=torch.int64, device=gather_device(world))
            for weight in [x for name, x in changed if (_SHARD in name) is sharded]:
                total = total * 31 + checksum_on_device(weight).to(total.device)
            values += [total & 0xFFFFFFFF, total >> 32]
        numbers = {name.partition(_SHARD)[2] for name, _ in changed}
        values.append(torch.full_like(values[0], zlib.crc32(repr(sorted(numbers)).encode())))
        self._sums = gather_in_background(torch.stack(values).double(), group=world)  # exact

    def _read_sums(self) -> None:
        sums, self._sums = self._sums, None
        if sums is None:
            return
        values = sums.read()
        shards = {tuple(row[4:]): row for row in reversed(values)}
        if any((row[:2] != values[0][:2]).any() or (row != shards[tuple(row[4:])]).any() for row in values):
            replicas = [_replicas(x) for x in self._wrappers]
            _compare(ValueError, _DRAWN, _joined({name: _sum(x) for name, x in one.items()} for one in replicas))

    @override
    def __reduce__(self) -> tuple[type[Agreement], tuple[()]]:
        return type(self), ()


class _Trained:
    """The parameters of a DDP module or a sharded module that train, and the weights that several ranks hold."""

    def __init__(self, wrapper: nn.Module, adapt: Adapt) -> None:
        self.adapt, self._state = adapt, _state_of(wrapper)
        self._versions = {name: version_of(x) for name, x in _replicas(wrapper).items()}

    def has_changed(self, wrapper: nn.Module) -> bool:
        """Return whether other parameters may train than at the last call, or others of their kind."""
        before, self._state = self._state, _state_of(wrapper)
        return self._state != before

    def facts(self, wrapper: nn.Module) -> Facts:
        """Return the parameters that train, by name."""
        shards = shards_of(wrapper)
        trained = [(name, shards.get(id(x), x)) for name, x in _inner(wrapper).named_parameters() if x.requires_grad]
        sharded = {True: ", sharded", False: ""}
        return {name: f"trains in {x.dtype} on {x.device.type}{sharded[isinstance(x, DTensor)]}" for name, x in trained}

    def changed_replicas(self, wrapper: nn.Module) -> list[tuple[str, Tensor]]:
        """Return the weights that have changed since the last call, of those that other ranks hold too."""
        replicas, before = _replicas(wrapper), self._versions
        self._versions = {name: version_of(x) for name, x in replicas.items()}
        return [(name, x) for name, x in replicas.items() if self._versions[name] != before.get(name)]


class _WeightsAtSetup:
    """The sharded weights of a module that was just set up.

    They are kept, because FSDP2 replaces sharded weights by whole ones between a forward and its backward.
    """

    def __init__(self, module: nn.Module) -> None:
        tensors = compared_tensors(module, buffers=False)
        self._whole = {name: x for name, x in tensors.items() if not isinstance(x, DTensor)}
        self._shards = {name: (x, _state(x)) for name, x in tensors.items() if isinstance(x, DTensor)}

    def facts(self, module: nn.Module) -> Facts:
        """Return checksums of whole weights, and whether this rank has changed sharded ones since set-up."""
        kind = class_of(module).__name__
        sums = {f"{name} of {kind}": _sum(x) for name, x in self._whole.items() if _has_values(x)}
        changed = next((name for name, (x, before) in self._shards.items() if _state(x) != before), None)
        return {**sums, f"any sharded weight of {kind}": "as at set-up" if changed is None else f"changed [{changed}]"}


def _state(weight: DTensor) -> tuple[int, int]:
    # The version detects operations on the whole weight, also on ranks where they leave the shard as it was.
    return version_of(weight), checksum(weight.to_local().detach())


def _inner(wrapper: nn.Module) -> nn.Module:
    return wrapper.module if isinstance(wrapper, DistributedDataParallel) else wrapper


def _state_of(wrapper: nn.Module) -> list[Any]:
    """Return what differs if other parameters train. It is read before each backward, so it is fast.

    A cast gives a parameter another storage, and DDP loses its hook. The weak reference keeps the address of an earlier
    storage from being used again. FSDP2 exchanges parameters, so only their kind counts.
    """
    modules = [_inner(wrapper)]
    for module in modules:
        modules += filter(None, module._modules.values())
    parameters = [x for module in modules for x in module._parameters.values() if x is not None]
    state: list[Any] = list(map(_KIND, parameters))
    if not isinstance(wrapper, DistributedDataParallel):
        return [*state, *map(type, parameters)]
    storages = (x.untyped_storage() for x in parameters if x.requires_grad)
    return [*state, *map(id, parameters), *map(_STORAGE, storages)]


@torch.no_grad()
def _replicas(wrapper: nn.Module) -> dict[str, Tensor]:
    """Return the weights that other ranks hold too, by name: whole ones, and the shards of HSDP with their numbers."""
    shards, replicas = shards_of(wrapper), {}
    for name, x in compared_tensors(_inner(wrapper), buffers=False).items():
        weight = shards.get(id(x), x)
        if isinstance(weight, DTensor):
            dims = list(zip(weight.placements, weight.device_mesh.get_coordinate() or (), strict=False))
            if any(kind.is_replicate() for kind, _ in dims):
                replicas[f"{name} {_SHARD}{[i for kind, i in dims if not kind.is_replicate()]}"] = weight.to_local()
        elif _has_values(weight):
            replicas[name] = weight
    return replicas


def _has_values(x: Tensor) -> bool:
    return not x.is_meta and x.layout == torch.strided and not isinstance(x, DTensor)


def _sum(x: Tensor) -> str:
    return f"checksum {checksum(x) % 2**64:x}"


def _has_peers() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _compare(kind: type[Exception], text: str, facts: Facts) -> None:
    """Raise the first difference between ranks, on all of them. Ranks: the whole world."""
    if not _has_peers():
        return
    by_rank: list[Facts] = gather_objects(dict(facts), dist.group.WORLD)
    shards = {name: x for one in reversed(by_rank) for name, x in one.items() if _SHARD in name}  # of the first owner
    filled = [{**shards, **one} for one in by_rank]
    difference = first_difference([_plain(one) for one in filled], missing="missing")
    if difference is not None:
        name, rank, _, _ = difference
        owner = next((i for i, one in enumerate(by_rank) if name in one), 0) if name in shards else 0
        first, here = (filled[one].get(name, "missing") for one in (owner, rank))
        raise kind(text.format(f"{name} differs: {first} on rank {owner}, {here} on rank {rank}"))


def _joined(facts: Iterable[Facts]) -> Facts:
    """Join facts about several modules."""
    return {f"{name}{f' of module {i}' if i else ''}": x for i, one in enumerate(facts) for name, x in one.items()}


def _plain(facts: Facts) -> Facts:
    """Leave out details in brackets, which may differ."""
    return {name: text.partition(" [")[0] for name, text in facts.items()}


def _settings(optimizers: Sequence[Any]) -> Facts:
    """Return the class and the settings of each parameter group, as text by name."""
    return dict(text for number, one in enumerate(optimizers) for text in _settings_of(one, number))


def _settings_of(optimizer: Any, number: int) -> Iterator[tuple[str, str]]:
    inner = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", optimizer)
    name = type(inner).__name__
    yield f"class of optimizer {number}", name
    yield f"number of parameter groups of {name}", str(len(inner.param_groups))
    for i, group in enumerate(inner.param_groups):
        yield f"number of parameters in group {i} of {name}", str(len(group["params"]))
        for key, value in group.items():
            on_host = isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"
            plain = value.item() if on_host else value
            if _is_plain(plain):
                yield f"{key} of {name} in group {i}", repr(plain)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.items()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
