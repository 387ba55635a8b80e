"""Faults planted in functions of the package: a run on the strict stand-in for NCCL, or its result, shows each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.attention.heads import JointHeads
from lightning_cp.comm import halo, ring_exchange, shards
from lightning_cp.comm.packet import BUFFERS
from lightning_cp.comm.transfer import Pending, exchange
from lightning_cp.mesh.groups import groups_for
from tests.harness import RankFailure, RankPool

_TAGS = (1.0, 2.0, 3.0)


def _attention(rank: int, world: int, *, ulysses: bool = False) -> None:
    """Attention over constant tensors: out is the value, and dK is 0."""
    degrees = {"ulysses_degree": world} if ulysses else {"ring_degree": world}
    config = ContextParallelConfig(**degrees, rotate_method="alltoall")
    q, k, v = (torch.full((1, 4, 6, 8), tag, requires_grad=True) for tag in _TAGS)
    out = context_parallel_attention(q, k, v, parallel_config=config)
    out.sum().backward()
    assert k.grad is not None
    torch.testing.assert_close(out, torch.full_like(out, _TAGS[2]))
    torch.testing.assert_close(k.grad, torch.zeros_like(k.grad), atol=1e-4, rtol=0)


def _ulysses(rank: int, world: int) -> None:
    _attention(rank, world, ulysses=True)


def _halos(rank: int, world: int, reaches: Sequence[int] = (1, 2)) -> None:
    groups = groups_for(ContextParallelConfig(ring_degree=world))
    for reach in reaches:
        halo.halo_exchange(torch.ones(4, 8), 1, [8] * world, reach, groups.name)


def _halos_in_order(rank: int, world: int, *, fault: bool) -> None:
    _halos(rank, world, (2, 1) if fault and rank == 1 else (1, 2))


def _halos_of_some(rank: int, world: int, *, fault: bool) -> None:
    if not (fault and rank == 2):
        _halos(rank, world)


def _gather(rank: int, world: int) -> None:
    groups = groups_for(ContextParallelConfig(ring_degree=world))
    x = torch.ones(1, 4, requires_grad=True)
    shards.gather_shards(x, 1, [4] * world, groups.name).sum().backward()


def _kinds_in_order(rank: int, world: int, *, fault: bool) -> None:
    """Two exchanges of equal sizes."""
    groups = groups_for(ContextParallelConfig(ring_degree=world))
    x = torch.full((4,), float(rank))
    calls: list[Callable[[], object]] = [
        lambda: torch.testing.assert_close(halo.sum_over_ranks(x, groups.name), torch.full((4,), 3.0)),
        lambda: shards.gather_shards(10 * x, 0, [4] * world, groups.name),
    ]
    for call in reversed(calls) if fault and rank == 2 else calls:
        call()


def _after_exchange(change: Callable[[Pending, Any, Any], object], module: Any = ring_exchange) -> Any:
    """Replace `exchange` of a module by one with a fault after each start."""

    def changed(sends: Any, receives: Any, *, group: Any) -> Pending:
        pending = exchange(sends, receives, group=group)
        change(pending, sends, receives)
        return pending

    return mock.patch.object(module, "exchange", changed)


def _again(pending: Pending, sends: Any, receives: Any) -> None:
    exchange(receives, sends, group=torch.distributed.group.WORLD).wait()


def _forget(pending: Pending, *_: Any) -> None:
    pending.kept_alive = ()


def _skipping(rank: int) -> Any:
    made = 0

    def forgetful(sends: Any, receives: Any, *, group: Any) -> Pending:
        nonlocal made
        made += 1
        return Pending() if rank == 1 and made == 2 else exchange(sends, receives, group=group)

    return mock.patch.object(halo, "exchange", forgetful)


def _swapped(rank: int) -> Any:
    pack = ring_exchange.pack_tensors
    return mock.patch.object(
        ring_exchange, "pack_tensors", lambda x, out=None: pack(list(x)[::-1] if rank == 1 else x, out)
    )


def _swapped_heads(rank: int) -> Any:
    to_heads = JointHeads.to_heads

    def swapped(self: JointHeads, tensors: Sequence[Tensor]) -> Tensor:
        return to_heads(self, [*tensors][::-1] if rank == 0 and len(tensors) == 3 else tensors)

    return mock.patch.object(JointHeads, "to_heads", swapped)


_PLANTED: dict[str, tuple[Callable[..., None], Callable[[int], Any], str]] = {
    "early write": (
        _attention,
        lambda _: _after_exchange(lambda _, s, receives: receives[0][1].zero_()),
        "receive buffer was written to",
    ),
    "write into a part": (
        _attention,
        lambda _: _after_exchange(lambda _, s, receives: receives[0][1][8:9].fill_(1)),
        "receive buffer was written to",
    ),
    "late write": (
        _attention,
        lambda _: _after_exchange(lambda _, sends, r: sends[0][1].zero_()),
        "send buffer was changed",
    ),
    "received while it is sent": (_attention, lambda _: _after_exchange(_again), "a buffer in use is used again"),
    "given back in flight": (
        _attention,
        lambda _: _after_exchange(lambda _, sends, r: BUFFERS.give(sends[0][1])),
        "a buffer in use is used again|was changed before wait|Tensor-likes are not close",
    ),
    "freed in flight": (_gather, lambda _: _after_exchange(_forget, shards), "a buffer was freed before wait"),
    "never waited for": (
        _halos,
        lambda _: mock.patch.object(Pending, "wait", return_value=None),
        "never waited for|a buffer was freed",
    ),
    "missing exchange": (_halos, _skipping, "hang: no rank can go on|never found their peers"),
    "swapped in the ring": (_attention, _swapped, "Tensor-likes are not close"),
    "swapped in Ulysses": (_ulysses, _swapped_heads, "Tensor-likes are not close"),
}
_OTHER_CALLS: dict[str, tuple[Callable[..., None], str]] = {
    "swapped order": (_halos_in_order, "but rank . receives"),
    "swapped kinds of equal sizes": (_kinds_in_order, "Tensor-likes are not close|different collectives"),
    "missing rank": (_halos_of_some, "hang: no rank can go on|never found their peers|has ended"),
}


def _run(rank: int, world: int, name: str, fault: bool) -> None:
    if name in _OTHER_CALLS:
        _OTHER_CALLS[name][0](rank, world, fault=fault)
        return
    program, plant, _ = _PLANTED[name]
    with plant(rank) if fault else nullcontext():
        program(rank, world)


@pytest.mark.parametrize("name", [*_PLANTED, *_OTHER_CALLS])
def test_a_fault_in_the_package_is_found(run_ranks: RankPool, name: str) -> None:
    message = _PLANTED[name][2] if name in _PLANTED else _OTHER_CALLS[name][1]
    run_ranks(3, _run, name, False, strict=True)
    with pytest.raises(RankFailure, match=message):
        run_ranks(3, _run, name, True, strict=True)
