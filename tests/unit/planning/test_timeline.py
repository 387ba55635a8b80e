"""The time of hand-made steps: overlap, the host, links, and what is named as the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_cp.planning.devices import Device
from lightning_cp.planning.step import Compute, Event, Layout, Part, Start, Step, Wait
from lightning_cp.planning.timeline import time_step

# 1 TFLOP/s, 1 TB/s, 1 GB/s within a node and 0.1 GB/s between nodes; no times of calls.
DEVICE = Device(
    "test", 1, 80, 1000, 1, 0.1, node_ranks=4, matmul_share=1, attention_share=0.5, call_us=0, backward_call_us=0,
    exchange_us=0, kernel_us=0, latency_us=0,
)  # fmt: skip
MM = Compute("aten::mm", 10**9, 0)  # 1 ms
SEND = 2_000_000  # 2 ms within a node


def _step(
    *events: Event, calls: int = 0, layout: Layout | None = None, repeats: int = 1, name: str = "block 0"
) -> Step:
    return Step(layout or Layout(ring=2), (Part(name, events, repeats),), {}, calls)


def test_a_transfer_overlaps_with_what_is_launched_before_its_wait() -> None:
    times = time_step(_step(Start(1, "ring", SEND), MM, Wait(1), MM), DEVICE)
    assert times.seconds == pytest.approx(3e-3)
    assert times.by_bound == pytest.approx({"compute": 2e-3, "ring": 1e-3})
    assert times.bound == "compute"


def test_a_transfer_that_is_waited_for_at_once_bounds_the_step() -> None:
    times = time_step(_step(MM, Start(1, "ring", SEND), Wait(1)), DEVICE)
    assert times.seconds == pytest.approx(3e-3)
    assert times.bound == "ring"


def test_communicators_send_at_the_same_time_and_each_in_order() -> None:
    both = _step(Start(1, "ring", SEND), Start(2, "ulysses", SEND), Wait(1), Wait(2), layout=Layout(ring=2, ulysses=2))
    assert time_step(both, DEVICE).seconds == pytest.approx(2e-3)
    one = _step(Start(1, "ring", SEND), Start(2, "ring", SEND), Wait(None))
    assert time_step(one, DEVICE).seconds == pytest.approx(4e-3)


def test_weights_are_gathered_ahead_while_the_block_before_is_computed() -> None:
    def block(*, is_ahead: bool) -> Step:
        start = Start(1, "world", SEND, of_shards=True, is_ahead=is_ahead)
        return _step(start, Wait(1), MM, MM, MM, layout=Layout(data=2, sharded=True), repeats=3)

    assert time_step(block(is_ahead=False), DEVICE).seconds == pytest.approx(15e-3)
    ahead = time_step(block(is_ahead=True), DEVICE)
    assert ahead.by_bound == pytest.approx({"compute": 9e-3, "world": 2e-3})  # the first gather
    slow = time_step(block(is_ahead=True), replace(DEVICE, link_gbs=0.5))  # 4 ms, each begins after the wait before
    assert slow.seconds == pytest.approx(15e-3)


def test_waits_of_repeated_parts_are_for_their_own_transfers() -> None:
    step = _step(Wait(0), Start(1, "ring", SEND), MM, repeats=3)  # waits for the transfer of the repetition before
    first = Part("begin", (Start(1, "ring", SEND),))
    times = time_step(replace(step, parts=(first, *step.parts)), DEVICE)
    assert times.seconds == pytest.approx(8e-3)  # four transfers, one after another
    assert times.by_bound == pytest.approx({"compute": 3e-3, "ring": 5e-3})


def test_the_host_bounds_a_step_of_many_short_operators() -> None:
    slow_host = replace(DEVICE, call_us=3000, backward_call_us=1000)
    times = time_step(_step(MM, MM, calls=4), slow_host)  # two calls for an event
    assert times.seconds == pytest.approx(13e-3)
    assert times.bound == "host"
    backward = time_step(_step(MM, MM, calls=4, name="block 0 backward"), slow_host)
    assert backward.seconds == pytest.approx(5e-3)


def test_the_host_of_a_cpu_computes_too() -> None:
    host = replace(DEVICE, call_us=1000)
    assert time_step(_step(MM, MM, calls=2), host).seconds == pytest.approx(3e-3)
    assert time_step(_step(MM, MM, calls=2), replace(host, kind="cpu")).seconds == pytest.approx(4e-3)


def test_on_a_cpu_transfers_do_not_overlap_with_compute() -> None:
    step = _step(Start(1, "ring", SEND), MM, Wait(1))
    assert time_step(step, DEVICE).seconds == pytest.approx(2e-3)
    times = time_step(step, replace(DEVICE, kind="cpu"))
    assert times.seconds == pytest.approx(3e-3)
    assert times.by_bound == pytest.approx({"compute": 1e-3, "ring": 2e-3})


def test_links_between_nodes_are_slower() -> None:
    for ring, seconds in ((2, 2e-3), (4, 20e-3)):  # a node has 4 ranks, a ring of 4 × 2 has 8
        step = _step(Start(1, "ring", SEND), Wait(1), layout=Layout(ring=ring, ulysses=2))
        assert time_step(step, DEVICE).seconds == pytest.approx(seconds)


def test_collectives_of_sharded_weights_have_a_share_of_the_bandwidth() -> None:
    device = replace(DEVICE, shards_share=0.25)
    for of_shards, seconds in ((False, 2e-3), (True, 8e-3)):
        step = _step(Start(1, "world", SEND, of_shards), Wait(1), layout=Layout(data=2))
        assert time_step(step, device).seconds == pytest.approx(seconds)


def test_operators_take_the_time_of_products_memory_or_launches() -> None:
    events = {
        "aten::mm": (Compute("aten::mm", 10**9, 10**6), 1e-3),
        "attention": (Compute("aten::_scaled_dot_product_cudnn_attention", 10**9, 10**6), 2e-3),
        "memory": (Compute("aten::add", 10**12, 10**10), 10e-3),
        "launches": (Compute("aten::add", 1, 1), 5e-6),
    }
    for event, seconds in events.values():
        assert time_step(_step(event), replace(DEVICE, kernel_us=5)).seconds == pytest.approx(seconds)
