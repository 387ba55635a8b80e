"""The strict stand-in for NCCL (tests/harness/strict) finds planted faults, and passes the same code without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import RankFailure, RankPool
from tests.harness.cases import full_unless
from tests.harness.strict import Strict

_SERIAL = Strict(serial=True)
_KEPT: list[Tensor] = []


def _kept(tensor: Tensor) -> Tensor:
    """Keep a buffer, as a caller must until the wait."""
    _KEPT.append(tensor)
    return tensor


def _start(rank: int, world: int, sent: Tensor, received: Tensor, group: Any = None) -> list[Any]:
    """Send to the next rank, and receive from the one before, in a batch."""
    group = group or dist.group.WORLD
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, _kept(sent), group=group, group_peer=(rank + 1) % world),
            dist.P2POp(dist.irecv, _kept(received), group=group, group_peer=(rank - 1) % world),
        ]
    )


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _early_read(rank: int, world: int, fault: bool) -> None:
    received = torch.zeros(4)
    works = _start(rank, world, torch.full((4,), float(rank)), received)
    if fault:
        found = received.clone()
    _wait(works)
    assert torch.equal(received if not fault else found, torch.full((4,), float((rank - 1) % world)))


def _write_to_receive_buffer(rank: int, world: int, fault: bool) -> None:
    received = torch.zeros(4)
    works = _start(rank, world, torch.ones(4), received)
    if fault and rank == 1:
        received[2] = 1.0
    _wait(works)


def _late_write(rank: int, world: int, fault: bool) -> None:
    sent, received = torch.ones(4), torch.zeros(4)
    works = _start(rank, world, sent, received)
    if fault and rank == 1:
        sent.add_(1)
    _wait(works)
    sent.add_(1)


def _reuse(rank: int, world: int, fault: bool) -> None:
    buffer = torch.zeros(8)
    first = _start(rank, world, torch.ones(4), buffer[:4])
    second = _start(rank, world, torch.ones(4), buffer[3:7] if fault else buffer[4:])
    _wait([*first, *second])


def _other_order(rank: int, world: int, fault: bool) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.broadcast(torch.ones(3), src=0),
    ]
    for call in reversed(calls) if fault and rank == 1 else calls:
        call()


def _other_size_of_transfer(rank: int, world: int, fault: bool) -> None:
    _wait(_start(rank, world, torch.ones(3), torch.ones(4 if fault and rank == 1 else 3)))


def _two_groups(rank: int, world: int, fault: bool) -> None:
    """The operations of two groups, in another order on one rank: only ranks that run one at a time hang."""
    groups = [dist.group.WORLD, dist.new_group()]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    order = reversed(groups) if fault and rank == 1 else groups
    _wait([dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in order])


def _collective_against_transfer(rank: int, world: int, fault: bool) -> None:
    dist.all_reduce(torch.ones(1))
    if fault and rank == 0:
        dist.all_reduce(torch.ones(3))
    _wait(_start(rank, world, torch.ones(3), torch.ones(3)))
    if not (fault and rank == 0):
        dist.all_reduce(torch.ones(3))


def _vote_between_posts(rank: int, world: int, fault: bool) -> None:
    """Ranks exchange something between hosts; one of them before its first transfer, the others after it."""
    control: Any = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1))

    def vote() -> None:
        dist.all_reduce(torch.ones(1), group=control)

    if fault and rank == 0:
        vote()
    works = _start(rank, world, torch.ones(3), torch.ones(3))
    if not (fault and rank == 0):
        vote()
    _wait(works)


def _subset_first(rank: int, world: int, fault: bool) -> None:
    """The first operation of a communicator is a transfer in which rank 2 takes no part."""
    if not fault:
        dist.all_reduce(torch.ones(1))
    buffer, group = torch.ones(3), dist.group.WORLD
    if rank < 2:
        operation = dist.isend if rank == 0 else dist.irecv
        _wait(dist.batch_isend_irecv([dist.P2POp(operation, buffer, group=group, group_peer=1 - rank)]))
    control: Any = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=control)
    dist.all_reduce(torch.ones(1))


def _crossed_pairs(rank: int, world: int, fault: bool) -> None:
    """Outside of a batch, the first transfer of a pair blocks the host, also with `isend`."""
    if rank < 2 and (fault or rank == 0):
        send = dist.isend(_kept(torch.ones(3)), 1 - rank)
        receive = dist.irecv(_kept(torch.ones(3)), 1 - rank) if fault else None
        _wait([x for x in (send, receive) if x is not None])
    elif rank < 2:
        dist.recv(_kept(torch.ones(3)), 0)


def _result_before_input(rank: int, world: int, fault: bool) -> None:
    """Rank 0 receives a result on one communicator before it sends the input that the result needs on another."""
    links, results = dist.new_group(), dist.new_group()
    for group in (links, results):
        dist.all_reduce(torch.ones(1), group=group)
        _wait(_start(rank, world, torch.ones(1), torch.ones(1), group))
    if rank == 2:
        return
    send = dist.isend if rank == 0 else dist.irecv
    receive = dist.irecv if rank == 0 else dist.isend
    operations = [
        dist.P2POp(send, _kept(torch.ones(3)), group=links, group_peer=1 - rank),
        dist.P2POp(receive, _kept(torch.ones(3)), group=results, group_peer=1 - rank),
    ]
    if fault and rank == 0:
        operations.reverse()
    _wait([work for operation in operations for work in dist.batch_isend_irecv([operation])])


def _never_received(rank: int, world: int, fault: bool) -> None:
    """A rank sends, does not wait, and ends."""
    _wait(_start(rank, world, torch.ones(1), torch.ones(1)))
    buffer, group = torch.ones(3), dist.group.WORLD
    works = []
    if rank == 0:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, buffer, group=group, group_peer=1)])
    if rank == 1 and not fault:
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, buffer, group=group, group_peer=0)])
    if not fault:
        _wait(works)


def _not_dense(rank: int, world: int, fault: bool) -> None:
    dist.all_reduce(torch.ones(4, 4)[:, :2] if fault else torch.ones(4, 4).T)


_CASES: list[tuple[Callable[..., None], Strict | bool, str]] = [
    (_early_read, True, "AssertionError"),
    (_write_to_receive_buffer, True, "a receive buffer was written to before wait"),
    (_late_write, True, "a send buffer was changed before wait"),
    (_reuse, True, "a buffer in use is used again"),
    (_other_order, True, "different collectives"),
    (_other_size_of_transfer, True, "but rank 1 receives 16 bytes"),
    (_two_groups, _SERIAL, "hang: no rank can go on"),
    (_collective_against_transfer, True, "which runs a collective"),
    (_crossed_pairs, True, "hang: no rank can go on"),
    (_result_before_input, _SERIAL, "hang: no rank can go on"),
    (_never_received, True, "never found their peers"),
    (_not_dense, True, "is not dense"),
    (_vote_between_posts, True, "ranks \\[0\\] have not used it"),
    (_subset_first, True, "ranks \\[2\\] have not used it"),
]


def _name(value: object) -> str:
    return getattr(value, "__name__", "").strip("_")


_DEFAULT = (_early_read, _late_write, _other_order, _two_groups, _never_received)


@pytest.mark.parametrize(
    ("function", "strict", "message"), full_unless(lambda function, *_: function in _DEFAULT, _CASES), ids=_name
)
@pytest.mark.default(1)
def test_a_planted_fault_is_found_and_clean_code_passes(
    run_ranks: RankPool, function: Callable[..., None], strict: Strict | bool, message: str
) -> None:
    run_ranks(3, function, False, strict=strict)
    with pytest.raises(RankFailure, match=message):
        run_ranks(3, function, True, strict=strict)


@pytest.mark.full
@pytest.mark.parametrize("function", [_two_groups, _result_before_input], ids=_name)
def test_orders_that_differ_between_communicators_pass_if_they_run_at_the_same_time(
    run_ranks: RankPool, function: Callable[..., None]
) -> None:
    run_ranks(3, function, True, strict=True)
