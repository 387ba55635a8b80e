"""What must be equal on all ranks, because gradients are averaged: weights, what trains, optimizers, Hydra's job."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.comm.agree import first_difference, gather_objects
from lightning_cp.comm.background import BackgroundGather, gather_device, gather_in_background
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.compat.fsdp_names import gathered_weights, weights_of_unit
from lightning_cp.engine.peers.checksum import checksum, checksum_on_device, version_of
from lightning_cp.engine.rules.paths import class_of
from lightning_cp.errors import PeerMismatchError
from lightning_cp.launch.rendezvous import job_id
from lightning_cp.mesh.sample_groups import world_control
from lightning_cp.strategies.ranks.sweep_ranks import job_overrides
from lightning_cp.strategies.weights.initial import compared_tensors

Facts = Mapping[str, str]  # by name, in words
Follow = Callable[[nn.Module, Any], None]  # adapts a wrapper before the backward of a loss
_EVERY = 8  # backwards between two looks at optimizers, and at replicated weights
_JOBS = (
    "{}; all ranks must run the same job, so two jobs must not use one MASTER_PORT, and a sweeper that draws values "
    "must not run on each rank: let the strategy start the ranks, or start one job at a time"
)
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
_OPTIMIZERS = "{}; weights are averaged over all ranks, so all must use the same settings"


def compare_jobs() -> None:
    """Check that all ranks run the same job: two jobs may have met at one port, or a sweeper may run on each rank.

    Ranks: the world. Raises: PeerMismatchError: on all ranks.
    """
    facts = {"id of the job": job_id(), "overrides of the Hydra job": " ".join(job_overrides())}
    _compare(PeerMismatchError, _JOBS, facts)


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

    def add_wrapper(self, wrapper: nn.Module, follow: Follow) -> None:
        """Compare the trained parameters of a DDP module or a sharded module with those at set-up.

        Args: follow: called on all ranks if they have all changed in the same way. Raises ValueError if it cannot.
        Ranks: the whole world.
        """
        self._wrappers[wrapper] = _Trained(wrapper, follow)
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
        watched = [self._wrappers[x] for x in averaged]
        changed = [number for number, x in enumerate(averaged) if watched[number].has_changed(x)]
        loaded = [at_setup.facts(module) for module, at_setup in self._loaded.items()]
        facts = [
            _joined(watched[number].facts(averaged[number]) for number in changed),
            _joined([*loaded, *(watched[number].new(averaged[number]) for number in changed)]),
            _settings([one for ref in self._optimizers if (one := ref())]) if looks and optimizers else {},
        ]
        self._loaded.clear()
        sums = [zlib.crc32(repr(sorted(_plain(one).items())).encode()) for one in facts]
        by_rank = all_gather_ints(sums, group=world_control("agreement"))
        if any(ints != by_rank[0] for ints in by_rank):
            _compare(ValueError, _TRAINED, _joined(one.facts(x) for x, one in zip(averaged, watched, strict=True)))
            _compare(ValueError, _LOADED, facts[1])
            _compare(PeerMismatchError, _OPTIMIZERS, facts[2])
        for number in changed:
            watched[number].follow(averaged[number], loss)
            watched[number].renew(averaged[number])
        if looks and weights:
            self._start_sums(averaged)

    def _start_sums(self, averaged: Sequence[nn.Module]) -> None:
        world = dist.group.WORLD
        assert world is not None, "there are peers"
        total = torch.zeros((), dtype=torch.int64, device=gather_device(world))
        for x in averaged:
            for weight in self._wrappers[x].changed_replicas(x):
                total = total * 31 + checksum_on_device(weight).to(total.device)
        halves = torch.stack([total & 0xFFFFFFFF, total >> 32]).double()  # exact
        self._sums = gather_in_background(halves, group=world)

    def _read_sums(self) -> None:
        sums, self._sums = self._sums, None
        if sums is None:
            return
        values = sums.read()
        if (values != values[0]).any():
            replicas = [_replicas(x) for x in self._wrappers]
            _compare(ValueError, _DRAWN, _joined({name: _sum(x) for name, x in one.items()} for one in replicas))

    @override
    def __reduce__(self) -> tuple[type[Agreement], tuple[()]]:
        return type(self), ()


class _Trained:
    """The trained parameters of a DDP module or a sharded module, as its gradients are averaged."""

    def __init__(self, wrapper: nn.Module, follow: Follow) -> None:
        self.follow = follow
        self._versions = {name: version_of(x) for name, x in _replicas(wrapper).items()}
        self.renew(wrapper)

    def renew(self, wrapper: nn.Module) -> None:
        """Take the parameters of now as those whose gradients are averaged."""
        self._known, self._fingerprint = dict(_trained(wrapper)), _fingerprint(wrapper)

    def has_changed(self, wrapper: nn.Module) -> bool:
        """Return whether the wrapper must be adapted. FSDP2 ignores frozen parameters; DDP, if it looks for them."""
        if _fingerprint(wrapper) == self._fingerprint:
            return False
        now, known = dict(_trained(wrapper)), self._known
        ignores_unused = getattr(wrapper, "find_unused_parameters", True) or getattr(wrapper, "static_graph", False)
        return bool(now) and now != known and not (ignores_unused and now.items() <= known.items())

    def facts(self, wrapper: nn.Module) -> Facts:
        """Return the parameters that train, by name."""
        return {
            name: f"trains in {dtype} on {device}{', sharded' if sharded else ''}"
            for name, (_, dtype, device, sharded) in _trained(wrapper)
        }

    def new(self, wrapper: nn.Module) -> Facts:
        """Return checksums of whole parameters that are new in training."""
        replicas = _replicas(wrapper)
        names = [name for name, key in _trained(wrapper) if self._known.get(name) != key and name in replicas]
        return {name: _sum(replicas[name]) for name in names}

    def changed_replicas(self, wrapper: nn.Module) -> list[Tensor]:
        """Return the whole weights that have changed since the last call."""
        replicas, before = _replicas(wrapper), self._versions
        self._versions = {name: version_of(x) for name, x in replicas.items()}
        return [x for name, x in replicas.items() if self._versions[name] != before.get(name)]


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


_Key = tuple[Any, torch.dtype, str, bool]  # of a parameter: node of its gradient, dtype, kind of device, is it sharded


def _key_of(wrapper: nn.Module) -> Callable[[nn.Parameter], _Key]:
    """Return a function that describes a parameter of a wrapper.

    For DDP, the description has the node at which gradients arrive: DDP has a hook on it, which a cast or a move drops.
    """
    if isinstance(wrapper, DistributedDataParallel):
        return lambda x: (get_gradient_edge(x).node, x.dtype, x.device.type, False)
    units = [inner for inner in wrapper.modules() if isinstance(inner, FSDPModule)]
    shards = {id(whole): shard for unit in units for shard, whole in gathered_weights(unit)}

    def key_of(x: nn.Parameter) -> _Key:
        weight = shards.get(id(x), x)
        return None, weight.dtype, weight.device.type, isinstance(weight, DTensor)

    return key_of


def _fingerprint(wrapper: nn.Module) -> list[tuple[int, str, _Key]]:
    """Return the modules, names and descriptions of the trained parameters. It is faster than `_trained`."""
    key_of, left = _key_of(wrapper), [_inner(wrapper)]
    trained: list[tuple[int, str, _Key]] = []
    while left:
        module = left.pop()
        for name, x in module._parameters.items():
            if x is not None and x.requires_grad:
                trained.append((id(module), name, key_of(x)))
        left += [inner for inner in module._modules.values() if inner is not None]
    return trained


def _trained(wrapper: nn.Module) -> Iterator[tuple[str, _Key]]:
    """Yield the parameters that train, by name, without those that DDP ignores, with their descriptions."""
    module, key_of = _inner(wrapper), _key_of(wrapper)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, x in module.named_parameters():
        if x.requires_grad and name not in ignored:
            yield name, key_of(x)


def _replicas(wrapper: nn.Module) -> dict[str, Tensor]:
    """Return the weights that each rank holds whole, by name."""
    module = _inner(wrapper)
    units = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
    sharded = {id(x) for unit in units for x in weights_of_unit(unit)}
    sharded |= {id(whole) for unit in units for _, whole in gathered_weights(unit)}
    tensors = compared_tensors(module, buffers=False)
    return {name: x for name, x in tensors.items() if id(x) not in sharded and _has_values(x)}


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
    difference = first_difference([_plain(one) for one in by_rank], missing="missing")
    if difference is not None:
        name, rank, _, _ = difference
        first, here = (by_rank[one].get(name, "missing") for one in (0, rank))
        raise kind(text.format(f"{name} differs: {first} on rank 0, {here} on rank {rank}"))


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
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
