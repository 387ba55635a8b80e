"""The strict stand-in for NCCL (tests/harness/strict) finds planted faults, and passes the same code without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import RankFailure, RankPool
from tests.harness.strict import Strict
from tests.harness.strict.left_out import LEFT_OUT

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


def _late_write(rank: int, world: int, fault: bool) -> None:
    sent, received = torch.ones(4), torch.zeros(4)
    works = _start(rank, world, sent, received)
    if fault and rank == 1:
        sent.add_(1)
    _wait(works)
    sent.add_(1)


def _two_groups(rank: int, world: int, fault: bool) -> None:
    """The operations of two groups, in another order on one rank: only ranks that run one at a time hang."""
    groups = [dist.group.WORLD, dist.new_group()]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    order = reversed(groups) if fault and rank == 1 else groups
    _wait([dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in order])


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


_CASES: list[tuple[Callable[..., None], Strict | bool, str]] = [
    (_early_read, True, "AssertionError"),
    (_late_write, True, "a send buffer was changed before wait"),
    (_two_groups, _SERIAL, "hang: no rank can go on"),
    (_never_received, True, "never found their peers"),
    (_subset_first, True, "ranks \\[2\\] have not used it"),
]


def _name(value: object) -> str:
    return getattr(value, "__name__", "").strip("_")


@pytest.mark.parametrize(("function", "strict", "message"), _CASES, ids=_name)
@pytest.mark.default(1)
def test_a_planted_fault_is_found_and_clean_code_passes(
    run_ranks: RankPool, function: Callable[..., None], strict: Strict | bool, message: str
) -> None:
    run_ranks(3, function, False, strict=strict)
    with pytest.raises(RankFailure, match=message):
        run_ranks(3, function, True, strict=strict)


def _vote_after_a_send(rank: int, world: int) -> float:
    """With NCCL, the host does not wait for a send, so it may take part in an exchange of hosts before the receive."""
    control: Any = dist.new_group(backend="gloo")
    _wait(_start(rank, world, torch.ones(1), torch.ones(1)))
    if rank == 0:
        _wait(dist.batch_isend_irecv([dist.P2POp(dist.isend, _kept(torch.ones(3)), group_peer=1)]))
    votes = torch.ones(1)
    dist.all_reduce(votes, group=control)
    if rank == 1:
        _wait(dist.batch_isend_irecv([dist.P2POp(dist.irecv, _kept(torch.zeros(3)), group_peer=0)]))
    return float(votes)


def test_the_host_goes_on_after_a_send_if_it_is_set(run_ranks: RankPool) -> None:
    assert run_ranks(3, _vote_after_a_send, strict=Strict(sends_block=False)) == [3.0] * 3


def _other_order_in_backward(rank: int, world: int) -> None:
    """DDP waits for futures, in C++. The fault is found while it does."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))

    def reduce(gradient: Tensor) -> None:
        dist.all_reduce(torch.ones(2), async_op=True)

    for step in range(2):
        if (rank, step) == (1, 1):
            model.module.weight.register_hook(reduce)
        model(torch.ones(2, 3)).sum().backward()


def test_a_fault_in_backward_of_ddp_ends_all_ranks(run_ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="different collectives") as error:
        run_ranks(2, _other_order_in_backward, strict=True)
    assert "exit code" not in str(error.value)
    assert "hung" not in str(error.value)


def test_the_tests_that_are_left_out_exist() -> None:
    for test in LEFT_OUT:
        path, _, name = test.partition("[")[0].partition("::")
        assert f"def {name}(" in (Path(__file__).parents[3] / path).read_text(), test
