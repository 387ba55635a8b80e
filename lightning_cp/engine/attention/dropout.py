"""Draw different dropout masks on each rank for shards; random states stay the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_cp.comm.background import is_capturing
from lightning_cp.engine.attention.replay import check_recomputation
from lightning_cp.engine.session import Session
from lightning_cp.errors import InterceptionError

T = TypeVar("T")


def drop(
    name: str,
    original: Callable[..., Any],
    session: Session,
    input: Tensor,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
    *,
    train: bool | None = None,  # name of `training` in torch.dropout
) -> Any:
    """Compute a dropout function for shards. In evaluation, for p = 0 and on whole tensors it calls torch's function.

    Other random numbers in a block (labels dropped by sample, blocks skipped at random) must be the same on all ranks
    of a context group, so they are not changed.

    Args: name, original: the function, of `torch.nn.functional` or `torch`. The other arguments are those of it.
    """
    training = train if training is None else training
    training = "alpha" not in name if training is None else training
    rank = _rank(session) if training and p != 0 else None
    whole = (input, p, training, inplace) if inplace else (input, p, training)  # torch.dropout has no `inplace`
    if rank is None:
        return original(*whole)
    check_recomputation(session.current())
    if torch.compiler.is_compiling() or _is_capturing(input):
        if name != "dropout":
            raise InterceptionError(
                f"{name} on shards cannot be compiled or captured in a CUDA graph: use nn.Dropout or F.dropout, or do "
                "not compile this block"
            )
        return _drop_in_graph(input, p, rank=rank, inplace=inplace)
    return _call_with_rank_seed(lambda: original(*whole), input.device, rank)


def _rank(session: Session) -> int | None:
    """Return this rank's index in its context group; None if the current forward has split nothing."""
    call = session.call
    return None if call is None or not call.lengths or call.groups.context is None else call.groups.context_rank


def _call_with_rank_seed(function: Callable[[], T], device: torch.device, rank: int) -> T:
    """Seed the device's generator for this rank, call the function, and restore the generator's state.

    The seed is a hash of the rank and of a random number that is the same on all ranks. Recomputation (activation
    checkpointing) restores the random states, so it drops the same elements.
    """
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    mixed = hashlib.blake2b(f"{drawn}/{rank}".encode(), digest_size=8).digest()
    generator = _generator_of(device)
    state = generator.get_state()
    try:
        generator.manual_seed(int.from_bytes(mixed, "big") >> 1)
        return function()
    finally:
        generator.set_state(state)


def _drop_in_graph(x: Tensor, p: float, *, rank: int, inplace: bool) -> Tensor:
    """Compute dropout in compiled code and in CUDA graphs, which cannot change the state of a generator.

    Draw two numbers, the same on all ranks. The mask is a hash of these numbers, the rank and each element's index.
    """
    drawn = torch.randint(1 << 31, (2,), dtype=torch.int64, device=x.device)
    seeds = _hash((drawn + (rank + 1) * 0x3C6EF372) & _BITS)
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    mixed = _hash((index + seeds[0]) & _BITS) ^ seeds[1] ^ (index >> 32)
    factor = (_hash(mixed) >= round(p * (1 << 32))).to(x.dtype) * (0.0 if p == 1 else 1 / (1 - p))
    return x.mul_(factor) if inplace else x * factor


_BITS = 0xFFFFFFFF


def _hash(x: Tensor) -> Tensor:
    """Mix integers below 2**32. (A product with a factor below 2**31 does not overflow int64.)"""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _BITS
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _BITS
    return x ^ (x >> 15)


def _is_capturing(x: Tensor) -> bool:
    """Return True if x is on a GPU and a CUDA graph is being captured."""
    return x.is_cuda and is_capturing()


def _generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that dropout on this device draws from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator
