"""Faults planted in real functions of the package, and in tiny programs: each is found and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp import ContextParallelConfig
from lightning_cp.attention.joint_heads import JointHeads
from lightning_cp.comm import halo, ring_exchange, shards
from lightning_cp.comm.buffers import BUFFERS
from lightning_cp.comm.transfer import Pending, exchange
from lightning_cp.mesh.groups import groups_for
from lightning_cp.planning.races import check_ranks, trace_all_ranks
from tests.unit.planning.test_races import TAGS, attention

Side = Sequence[tuple[int, Tensor]]
WORLD = 3


def faults_of(step: Callable[[int], object], **settings: Any) -> list[str]:
    return check_ranks(trace_all_ranks(step, WORLD, **settings))


def ring_with(change: Callable[[Pending, Side, Side, Any], object]) -> list[str]:
    """Attention with a fault after each start of an exchange in the ring."""

    def changed(sends: Side, receives: Side, *, group: Any) -> Pending:
        pending = exchange(sends, receives, group=group)
        change(pending, sends, receives, group)
        return pending

    with mock.patch.object(ring_exchange, "exchange", changed):
        return faults_of(attention(WORLD, 1, rotate="alltoall", lengths=(4,) * WORLD, kind="plain"))


def assert_found(faults: list[str], *words: str) -> None:
    assert any(all(word in fault for word in words) for fault in faults), "\n".join(faults)


def test_early_read() -> None:
    faults = ring_with(lambda pending, sends, receives, group: receives[0][1].sum())
    assert_found(faults, "rank 1: aten::sum reads", "transfer 2 (lightning_cp::attention, ranks [0, 1, 2])", "rank 0")
    assert all("receives from" in x for x in faults)


def test_late_write() -> None:
    faults = ring_with(lambda pending, sends, receives, group: sends[0][1].zero_())
    assert_found(faults, "rank 0: aten::zero_ writes", "transfer 2 (lightning_cp::attention", "sends to rank 1")


def test_write_into_a_part_of_a_received_buffer() -> None:
    assert_found(ring_with(lambda pending, sends, receives, group: receives[0][1][8:9].fill_(1)), "aten::fill_ writes")


def test_buffer_is_received_while_it_is_sent() -> None:
    def again(pending: Pending, sends: Side, receives: Side, group: Any) -> None:
        second = exchange(receives, sends, group=group)
        second.wait()

    assert_found(ring_with(again), "rank 0: transfer 3", "writes bytes", "transfer 2", "sends to rank 1")


def test_buffer_is_given_back_in_flight() -> None:
    faults = ring_with(lambda pending, sends, receives, group: BUFFERS.give(sends[0][1]))
    assert_found(faults, "rank 2: a buffer of transfer 2", "is given back to BUFFERS before the wait")


def test_buffer_is_freed_in_flight() -> None:
    def careless(sends: Side, receives: Side, *, group: Any) -> Pending:
        pending = exchange(sends, receives, group=group)
        pending.kept_alive = ()
        return pending

    def step(rank: int) -> None:
        groups = groups_for(ContextParallelConfig(ring_degree=WORLD))
        x = torch.ones(1, 4, requires_grad=True)
        shards.gather_shards(x, 1, [4] * WORLD, groups.name).sum().backward()

    assert faults_of(step) == []
    with mock.patch.object(shards, "exchange", careless):
        assert_found(faults_of(step), "rank 0: a buffer of transfer 2 (lightning_cp::scatter_sum", "is freed")


def test_never_waited_for() -> None:
    def wait(self: Pending) -> None:
        """Return at once."""

    with mock.patch.object(Pending, "wait", wait):
        step = attention(WORLD, 1, rotate="allgather", lengths=(4,) * WORLD, kind="plain")
        faults = faults_of(step)
    assert_found(faults, "rank 1: transfer 2 (lightning_cp::attention, ranks [0, 1, 2]) is never waited for")
    assert_found(faults, "rank 1: aten::sum reads", "transfer 4 (lightning_cp::attention_backward", "before the wait")


def halos(rank: int) -> None:
    """Two halo exchanges of different sizes."""
    groups = groups_for(ContextParallelConfig(ring_degree=WORLD))
    for reach in (1, 2):
        halo.halo_exchange(torch.ones(4, 8), 1, [8] * WORLD, reach, groups.name)


def test_missing_exchange() -> None:
    calls = {"made": 0}

    def forgetful(sends: Side, receives: Side, *, group: Any) -> Pending:
        calls["made"] += 1
        skips = dist.get_rank() == 1 and calls["made"] % 2 == 0  # the second of two on each rank
        return Pending() if skips else exchange(sends, receives, group=group)

    assert faults_of(halos) == []
    with mock.patch.object(halo, "exchange", forgetful):
        faults = faults_of(halos)
    assert_found(faults, "rank 0: transfer 2 (lightning_cp::halo_exchange", "to rank 1, which does not take part")
    assert_found(faults, "deadlock: rank 0: transfer 2", "waits for a rank that does not take part")


def test_swapped_order() -> None:
    def step(rank: int) -> None:
        groups = groups_for(ContextParallelConfig(ring_degree=WORLD))
        for reach in (2, 1) if rank == 1 else (1, 2):
            halo.halo_exchange(torch.ones(4, 8), 1, [8] * WORLD, reach, groups.name)

    faults = faults_of(step)
    assert_found(faults, "rank 0: transfer 1", "sends 16 bytes to rank 1, which expects 32 bytes there")


def test_swapped_order_of_collectives_of_equal_sizes() -> None:
    def step(rank: int) -> None:
        groups = groups_for(ContextParallelConfig(ring_degree=WORLD))
        kinds = (halo.sum_over_ranks, lambda x, name: shards.gather_shards(x, 0, [4] * WORLD, name))
        for transfer in reversed(kinds) if rank == 2 else kinds:
            transfer(torch.ones(4), groups.name)

    assert_found(
        faults_of(step), "rank 0: transfer 1 (lightning_cp::sum_over_ranks", "transfer 1 (lightning_cp::gather"
    )


def test_swapped_tensors_of_equal_size_in_the_ring() -> None:
    pack = ring_exchange.pack_tensors

    def swapped(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        return pack(list(tensors)[::-1] if dist.get_rank() == 1 else tensors, out)

    with mock.patch.object(ring_exchange, "pack_tensors", swapped):
        step = attention(WORLD, 1, rotate="alltoall", lengths=(4,) * WORLD, kind="plain")
        faults = faults_of(step, hops=4, tags=TAGS)
    assert_found(
        faults, "rank 2: aten::_scaled_dot_product_flash_attention_for_cpu reads value as key, after transfer 2"
    )


def test_swapped_tensors_of_equal_size_in_ulysses() -> None:
    to_heads = JointHeads.to_heads

    def swapped(self: JointHeads, tensors: Sequence[Tensor]) -> Tensor:
        return to_heads(self, [*tensors][::-1] if dist.get_rank() == 0 and len(tensors) == 3 else tensors)

    with mock.patch.object(JointHeads, "to_heads", swapped):
        step = attention(1, WORLD, rotate="allgather", lengths=(4,) * WORLD, kind="plain")
        faults = faults_of(step, hops=4, tags=TAGS)
    assert_found(faults, "rank 1:", "reads value as query, after transfer 2")


def test_missing_rank() -> None:
    faults = faults_of(lambda rank: None if rank == 2 else halos(rank))
    assert_found(faults, "rank 1: transfer 1", "to rank 2, which makes no transfer at all")
    assert_found(check_ranks(trace_all_ranks(halos, WORLD)[:2]), "to rank 2, which makes no transfer at all")


def of_two_groups(rank: int, reversed_on: int | None, *, overlap: bool) -> None:
    """Neighbours exchange in two groups of all ranks."""
    groups = [dist.new_group(range(WORLD)) for _ in range(2)]
    pending, buffers = [], []
    for group in reversed(groups) if rank == reversed_on else groups:
        peers = (rank + 1) % WORLD, (rank - 1) % WORLD
        x, y = torch.zeros(8), torch.zeros(8)
        buffers += [x, y]
        pending.append(exchange([(peers[0], x)], [(peers[1], y)], group=group))
        if not overlap:
            pending[-1].wait()
    for each in pending:
        each.wait()


def test_two_communicators_in_different_order() -> None:
    assert faults_of(lambda rank: of_two_groups(rank, None, overlap=True)) == []
    faults = faults_of(lambda rank: of_two_groups(rank, 1, overlap=True))
    assert_found(faults, "possible deadlock, as communicators are used in different orders: rank 0")
    faults = faults_of(lambda rank: of_two_groups(rank, 1, overlap=False))
    assert_found(faults, "deadlock: rank 1: transfer 1 (ranks [0, 1, 2], group 2) waits for rank 0 to begin")


def test_ranks_that_send_one_after_another_block_each_other() -> None:
    def step(rank: int) -> None:
        groups = groups_for(ContextParallelConfig(ring_degree=WORLD))
        x, y = torch.zeros(8), torch.zeros(8)
        assert groups.context is not None
        exchange([((rank + 1) % WORLD, x)], [], group=groups.context).wait()
        exchange([], [((rank - 1) % WORLD, y)], group=groups.context).wait()

    assert_found(faults_of(step), "deadlock: rank 0: transfer 1", "waits for rank 1 to begin its transfer 2")
