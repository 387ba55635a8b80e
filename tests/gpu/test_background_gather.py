"""The background all-gather over NCCL on one GPU: right values, and neither the host nor the current stream waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_cp.comm.background import gather_device, gather_in_background

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLEEP_CYCLES = 2_000_000_000  # about a second on the device


@pytest.fixture(autouse=True)
def _nccl(tmp_path: Path) -> Iterator[None]:
    """A group of one rank; its first all-gather is done, since it builds the communicator."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=device)
    gather_in_background(torch.zeros(4, device=device, dtype=torch.float64), group=dist.group.WORLD).read()
    torch.cuda.synchronize()
    yield
    dist.destroy_process_group()


def test_values_are_taken_from_the_gpu_and_arrive_on_the_host() -> None:
    device = gather_device(dist.group.WORLD)
    assert device.type == "cuda"
    values = torch.arange(4, device=device, dtype=torch.float64) / 3
    gather = gather_in_background(values, group=dist.group.WORLD)
    found = gather.read()
    assert found.shape == (1, 4)
    assert found[0].tolist() == values.tolist()
    assert gather.gathered.is_pinned()
    assert gather.is_done()


def test_the_host_does_not_wait_for_the_device() -> None:
    values = torch.ones(4, device="cuda", dtype=torch.float64)
    torch.cuda.synchronize()
    began = time.monotonic()
    torch.cuda._sleep(SLEEP_CYCLES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gather = gather_in_background(values, group=dist.group.WORLD)
        assert not gather.is_done(within_s=0.05), "the all-gather is behind the sleep"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    started = time.monotonic() - began
    assert gather.read().tolist() == [[1.0] * 4]
    assert started < time.monotonic() - began - 0.1


def test_the_current_stream_does_not_wait_for_the_copy() -> None:
    """Work on the current stream runs while a transfer that was started on another stream is held up."""
    values, held_up = torch.ones(4, device="cuda", dtype=torch.float64), torch.cuda.Stream()
    values.mul(2)  # loading a kernel waits for the device
    torch.cuda.synchronize()
    with torch.cuda.stream(held_up):
        torch.cuda._sleep(SLEEP_CYCLES)
        gather = gather_in_background(values, group=dist.group.WORLD)
    done = torch.cuda.Event()
    values.mul(2)
    done.record()
    done.synchronize()
    assert not gather.is_done()
    assert gather.read().tolist() == [[1.0] * 4]


def test_memory_of_a_dropped_gather_is_not_reused_too_early() -> None:
    values = torch.ones(1 << 20, device="cuda", dtype=torch.float64)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    gather = gather_in_background(values, group=dist.group.WORLD)
    address = gather.kept_alive[1].data_ptr()
    del gather
    other = torch.empty(1 << 20, device="cuda", dtype=torch.float64)
    assert other.data_ptr() != address
    torch.cuda.synchronize()
