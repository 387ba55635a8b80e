"""Save, share and restore the global random states that user code draws from, and seed workers: torch, Python, NumPy.

Ranks of a context group share a sample, so they must draw the same numbers. Data groups draw different ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.agree import gather_objects
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.data.keyed_random import RandomStream, keyed_generator
from lightning_cp.engine.peers.checksum import digest_ints
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.nest import replace

State = dict[str, Any]
# Seed a generator with 64 bits, by its name in a state. Seeding torch seeds the GPU's generator too.
_SEED: dict[str, Callable[[int], object]] = {
    "torch": lambda seed: torch.manual_seed(seed >> 1),
    "python": random.seed,
    "numpy": lambda seed: np.random.seed(seed % 2**32),
}


def get_random_state() -> State:
    """Return this process's states: torch (CPU and current CUDA device), Python, and NumPy's global generator."""
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: State = {
        "torch": torch.get_rng_state(),
        "python": (version, *internal, gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore states from `get_random_state`. A CUDA state is ignored without a GPU."""
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    version, *internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))


def share_random_state(groups: MeshGroups) -> None:
    """Copy the first rank's states to all ranks of its context group. Data groups keep their own states.

    Ranks: all ranks of the context group.
    """
    if groups.context is None:
        return
    set_random_state(_gather(get_random_state(), groups.context)[0])


def separate_random_states(groups: MeshGroups) -> None:
    """Give data groups with equal states different ones: after `seed_everything`, they would draw the same noise.

    Of groups with equal states, the first one keeps them, so a run with one group draws what it always drew. The others
    are seeded with a hash of the state and their index. Each generator (torch, Python, NumPy) is compared separately.

    Ranks: the whole world, after `share_random_state`.
    """
    if groups.data_size == 1:
        return
    assert dist.group.WORLD is not None, "several data groups are ranks of a process group"
    state = get_random_state()
    digests = {name: _digest(state[name]) >> 1 for name in _SEED}
    gathered = all_gather_ints([groups.data_rank, *digests.values()], group=dist.group.WORLD)
    earlier = [others for data_rank, *others in gathered if data_rank < groups.data_rank]
    for i, (name, digest) in enumerate(digests.items()):
        if any(others[i] == digest for others in earlier):
            _SEED[name](_digest([digest, groups.data_rank]))


def random_states(data_rank: int, data_size: int) -> list[State]:
    """Gather the states of each data group's first rank, in data-rank order.

    Args: data_rank, data_size: index of this rank's context group, and number of context groups.
    Ranks: the whole world.
    """
    if not dist.is_initialized():
        return [get_random_state()]
    states = _gather((data_rank, get_random_state()), dist.group.WORLD)
    first = dict(reversed(states))  # keep the lowest rank of each data group
    return [first[group] for group in range(data_size)]


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather a nest of tensors; they are sent as arrays, because torch pickles tensors as files."""
    gathered = gather_objects(replace(Tensor, lambda x: x.cpu().numpy(), value), group)
    return [replace(np.ndarray, lambda x: torch.from_numpy(x.copy()), one) for one in gathered]


def restore_random_states(states: Sequence[State], data_rank: int, data_size: int) -> None:
    """Restore the states of this rank's data group from the result of `random_states`.

    If the number of data groups has changed, each group is seeded with a hash of all saved states and its index, so
    that no group repeats the numbers of another group or of the earlier run. But if all saved states are equal, the
    first group gets this state. If `states` is empty, nothing is done.
    """
    if not states:
        return
    digests = [_digest(state) for state in states]
    if len(states) == data_size:
        set_random_state(states[data_rank])
    elif len(set(digests)) == 1 and data_rank == 0:
        set_random_state(states[0])
    else:
        for seed in _SEED.values():
            seed(_digest([*digests, data_rank, data_size]))


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Draw from states that depend on some numbers only; restore the states after the context."""
    state = get_random_state()
    for seed in _SEED.values():
        seed(_digest(numbers))
    try:
        yield
    finally:
        set_random_state(state)


def is_same_state(a: State, b: State) -> bool:
    """Return True if two states are equal."""
    return _digest(a) == _digest(b)


class RandomStates:
    """The random states of all data groups, as a stateful object for `fabric.save` and `fabric.load`.

    Saving gathers the states from all ranks; loading restores them like `restore_random_states`.
    """

    def __init__(self, data_rank: int, data_size: int) -> None:
        self._data_rank, self._data_size = data_rank, data_size

    def state_dict(self) -> dict[str, Any]:
        """Gather the states of all data groups. Ranks: the whole world."""
        return {"groups": random_states(self._data_rank, self._data_size)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of this rank's data group."""
        restore_random_states(state["groups"], self._data_rank, self._data_size)


def _digest(value: Any) -> int:
    """Return a 64-bit hash of a nest of tensors and plain values."""
    plain = replace(Tensor, lambda x: x.cpu().numpy().tobytes(), value)
    return digest_ints(plain, 1)[0] & ((1 << 64) - 1)


@dataclass(frozen=True)
class WorkerSeed:
    """Seed Python, NumPy and torch in a DataLoader worker from (seed, data_rank, worker_id) only."""

    seed: int
    data_rank: int

    def __call__(self, worker_id: int) -> None:
        drawn = keyed_generator(self.seed, RandomStream.WORKER, step=self.data_rank, index=worker_id).integers(
            1 << 63, size=3, dtype=np.int64
        )
        random.seed(int(drawn[0]))
        np.random.seed(int(drawn[1]) % (1 << 32))
        torch.manual_seed(int(drawn[2]))


def worker_init_fn(seed: int, data_rank: int) -> WorkerSeed:
    """Create a `worker_init_fn` for DataLoader that seeds by data rank.

    Ranks of one context group then augment a sample in the same way, and data ranks augment differently. (Lightning
    seeds by global rank, which would give the ranks of one group different data.)
    """
    return WorkerSeed(seed, data_rank)


def seeds_of_loader(seed: int, data_rank: int) -> dict[str, Any]:
    """Return the arguments of a DataLoader that make its random numbers independent of the global generator."""
    return {
        "worker_init_fn": worker_init_fn(seed, data_rank),
        "generator": torch.Generator().manual_seed(seed),  # iter() draws from it
    }
