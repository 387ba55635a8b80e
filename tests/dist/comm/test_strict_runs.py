"""The options of strict runs (tests/harness/strict), how they find a hang, and which tests they leave out."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.comm.test_strict_faults import _kept, _start, _wait
from tests.harness import RankFailure, RankPool
from tests.harness.strict import Coordinator, Strict, coordinator
from tests.harness.strict.left_out import LEFT_OUT
from tests.harness.strict.messages import Done, Look, Operation, Waits


def _vote_after_a_send(rank: int, world: int) -> None:
    """With NCCL, the host does not wait for a send, so it may take part in an exchange of hosts before the receive."""
    control: Any = dist.new_group(backend="gloo")
    _wait(_start(rank, world, torch.ones(1), torch.ones(1)))
    if rank == 0:
        _wait(dist.batch_isend_irecv([dist.P2POp(dist.isend, _kept(torch.ones(3)), group_peer=1)]))
    dist.all_reduce(torch.ones(1), group=control)
    if rank == 1:
        _wait(dist.batch_isend_irecv([dist.P2POp(dist.irecv, _kept(torch.zeros(3)), group_peer=0)]))


def test_the_host_goes_on_after_a_send_if_it_is_set(run_ranks: RankPool) -> None:
    run_ranks(3, _vote_after_a_send, strict=Strict(sends_block=False))


def _threads(rank: int, world: int) -> list[str]:
    found, x = [], torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: found.append(threading.current_thread().name))
    (x * 2).sum().backward()
    return found


def test_backward_runs_in_a_thread_of_its_own_if_it_is_set(run_ranks: RankPool) -> None:
    assert run_ranks(1, _threads, strict=True) == [["MainThread"]]
    assert run_ranks(1, _threads, strict=Strict(backward_thread=True)) == [["backward"]]


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


def test_a_rank_that_needs_time_to_go_on_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 sleeps after its wait; rank 0 answers late."""
    monkeypatch.setattr(coordinator, "_QUIET_S", 0.01)
    with Coordinator(2, Strict()) as strict:
        ranks = [Client(strict.address, "AF_UNIX") for _ in range(2)]
        for rank, connection in enumerate(ranks):
            for message in (rank, Operation(0, "group", (0, 1), "barrier", data=(b"", b"")), Waits(0, False)):
                connection.send(message)
        assert [x.recv() for x in ranks] == 2 * [Done(0, (b"", b""))]
        for message in (Operation(1, "group", (0, 1), "barrier", data=(b"", b"")), Waits(1, False)):
            ranks[0].send(message)
        for _ in range(5):  # a hang of ranks that all wait here is found at the second
            assert [x.recv() for x in ranks] == 2 * [Look()]
            time.sleep(0.1)
            assert not any(x.poll() for x in ranks), "it looks again before it has the answers"
            for connection in ranks:
                connection.send(Look())
        ranks[1].send(Operation(1, "group", (0, 1), "barrier", data=(b"", b"")))
        for connection in ranks:
            assert next(x for x in iter(connection.recv, None) if x != Look()) == Done(1, (b"", b""))
            connection.close()
    assert strict.fault == ""


def _many_large(rank: int, world: int) -> float:
    tensors = [torch.full((500_000,), float(i)) for i in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    _wait(works)
    return sum(float(x[-1]) for x in tensors)


def test_large_operations_are_posted_while_the_results_of_others_arrive(run_ranks: RankPool) -> None:
    assert run_ranks(2, _many_large, strict=True) == 2 * [2.0 * sum(range(8))]


@pytest.mark.parametrize("test", LEFT_OUT)
def test_a_test_that_is_left_out_exists(test: str) -> None:
    path, _, name = test.partition("[")[0].partition("::")
    assert f"def {name}(" in (Path(__file__).parents[3] / path).read_text()
