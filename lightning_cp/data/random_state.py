"""The states of the random number generators that user code draws from: torch's, Python's and NumPy's.

Ranks of a context group share a sample, so they must draw the same numbers; data groups draw what their seeds give.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.mesh import MeshGroups

State = dict[str, Any]


def get_random_state() -> State:
    """The states of this process: torch's on the CPU and on the current CUDA device, Python's, NumPy's global one."""
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
    """Set what `get_random_state` returned. A state of CUDA is left out where there is no GPU."""
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    version, *internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, _as_uint32(keys), *rest))


def share_random_state(groups: MeshGroups) -> None:
    """Give the ranks of each context group the states of its first rank. Data groups keep theirs.

    Ranks: all of the context group.
    """
    if groups.context is None:
        return
    everyone: list[Any] = [None] * groups.context_size
    dist.all_gather_object(everyone, _as_arrays(get_random_state()), group=groups.context)
    set_random_state(_as_tensors(everyone[0]))


def random_states(data_rank: int, data_size: int) -> list[State]:
    """The states of each data group, in their order: those of its first rank.

    Args: data_rank, data_size: index of this rank's context group, and how many there are.
    Ranks: the whole world.
    """
    if not dist.is_initialized():
        return [get_random_state()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (data_rank, _as_arrays(get_random_state())))
    first = dict(reversed(everyone))  # the lowest rank of each
    return [_as_tensors(first[group]) for group in range(data_size)]


def restore_random_states(states: Sequence[State], data_rank: int, data_size: int) -> None:
    """Set the states of this rank's data group, as `random_states` returned them.

    With another number of data groups than then: if all groups had the same states, every group gets these; else each
    group is seeded from all of them and from its index, so that groups draw different numbers, and none draws those
    that were drawn before. Nothing is done if `states` is empty.
    """
    if not states:
        return
    digests = [_digest(state) for state in states]
    if len(states) == data_size:
        set_random_state(states[data_rank])
    elif len(set(digests)) == 1:
        set_random_state(states[0])
    else:
        seed = _digest([*digests, data_rank, data_size])
        torch.manual_seed(seed >> 1)
        random.seed(seed)
        np.random.seed(seed % 2**32)


def is_same_state(a: State, b: State) -> bool:
    """Whether two states are equal."""
    return _digest(a) == _digest(b)


class RandomStates:
    """The random states of all data groups, as an object that `fabric.save` and `fabric.load` take in their state.

    Saving gathers them from all ranks; loading restores them, as `restore_random_states` does.
    """

    def __init__(self, data_rank: int, data_size: int) -> None:
        self._data_rank, self._data_size = data_rank, data_size

    def state_dict(self) -> dict[str, Any]:
        """States of each data group. Ranks: the whole world."""
        return {"groups": random_states(self._data_rank, self._data_size)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this data group's."""
        restore_random_states(state["groups"], self._data_rank, self._data_size)


def _as_arrays(value: Any) -> Any:
    """The same nest with arrays in place of tensors, which torch would pickle as files."""
    if isinstance(value, Tensor):
        return value.cpu().numpy()
    if isinstance(value, Mapping):
        return {name: _as_arrays(x) for name, x in value.items()}
    return tuple(_as_arrays(x) for x in value) if isinstance(value, tuple) else value


def _as_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {name: _as_tensors(x) for name, x in value.items()}
    return tuple(_as_tensors(x) for x in value) if isinstance(value, tuple) else value


def _digest(value: Any) -> int:
    """64 bits of a hash of a nest of tensors and plain values."""
    return int.from_bytes(hashlib.blake2b(repr(_plain(value)).encode(), digest_size=8).digest(), "big")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu().numpy().tobytes()
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, (list, tuple)) else value


def _as_uint32(keys: Tensor) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return keys.cpu().numpy().astype(np.uint32)
