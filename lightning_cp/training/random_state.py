"""The states of the random number generators that user code draws from: torch's, Python's and NumPy's."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def random_states() -> list[dict[str, Any]]:
    """Of all ranks, in their order. Call it on every rank."""
    if not dist.is_initialized():
        return [_own_state()]
    states: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(states, _own_state())
    return states


def restore_random_state(states: list[dict[str, Any]]) -> None:
    """This rank's own, if there are as many ranks as then; else the generators stay as they were seeded."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if len(states) != world:
        return
    own = states[rank]
    torch.set_rng_state(own["torch"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    version, *internal, gauss = own["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = own["numpy"]
    np.random.set_state((kind, _as_uint32(keys), *rest))


def _own_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, *internal, gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _as_uint32(keys: Tensor) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    return keys.numpy().astype(np.uint32)
