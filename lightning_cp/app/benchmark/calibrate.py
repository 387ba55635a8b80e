"""Measure the rates of a device for the planner: products, attention, memory, links between ranks, and the host."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_cp.app.benchmark.report import machine_name
from lightning_cp.app.settings.target import reads_settings
from lightning_cp.launch.rendezvous import join_launcher
from lightning_cp.planning.devices import GB, MEASURED, Device, as_figures
from lightning_cp.planning.recorder import Recorder

_REPEATS = 5


@reads_settings
def calibrate(config: DictConfig) -> None:
    """Measure on every rank at the same time; rank 0 writes the device as YAML."""
    is_gpu = config.device == "cuda"
    if is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_launcher()
    dist.init_process_group("nccl" if is_gpu else "gloo")
    device = measured_device(torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu"))
    if dist.get_rank() == 0:
        OmegaConf.save(as_figures(device), Path(config.result))
    dist.destroy_process_group()


def measured_device(device: torch.device) -> Device:
    """Return the rates of this machine. Ranks: all, at the same time."""
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    n, tokens, heads = (8192, 16384, 24) if is_gpu else (1024, 1024, 4)

    def seconds(step: Callable[[], object], repeats: int = 1) -> float:
        return _seconds(step, device, repeats)

    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    products = 2 * n**3 / seconds(lambda: a @ b)
    q, k, v = torch.randn(3, 1, heads, tokens, 128, dtype=dtype, device=device).unbind()
    attention = 4 * heads * tokens**2 * 128 / seconds(lambda: scaled_dot_product_attention(q, k, v))
    x = torch.randn((1 << 28) if is_gpu else (1 << 24), device=device)
    memory = 3 * x.numel() * x.element_size() / seconds(lambda: torch.add(x, x))
    small = torch.zeros(1, device=device)
    kernel = seconds(lambda: small.add_(1), 200)
    forward, backward = _host_seconds(device)
    latency = _ring_seconds(small, device)
    large = x[: (1 << 26) if is_gpu else (1 << 22)]
    link = large.numel() * large.element_size() / max(_ring_seconds(large, device) - latency, 1e-9)
    total = (
        torch.cuda.get_device_properties(device).total_memory if is_gpu else _memory_bytes() // dist.get_world_size()
    )
    return Device(
        machine_name(),
        products / 1e12,
        total / GB,
        memory / GB,
        link / GB,
        link / GB,
        node_ranks=max(dist.get_world_size(), 2),
        matmul_share=1.0,
        attention_share=attention / products,
        call_us=1e6 * forward,
        backward_call_us=1e6 * backward,
        exchange_us=50.0 if is_gpu else 0.0,
        kernel_us=1e6 * kernel if is_gpu else 0.0,
        latency_us=1e6 * latency,
        kind="cuda" if is_gpu else "cpu",
        capability=torch.cuda.get_device_capability(device) if is_gpu else (9, 0),
        source=MEASURED,
    )


def _seconds(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a step. Args: repeats: of the step in one measurement."""
    times = []
    for _ in range(_REPEATS + 2):
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            step()
        _synchronize(device)
        times.append((time.perf_counter() - started) / repeats)
    return statistics.median(times[2:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_seconds(device: torch.device) -> tuple[float, float]:
    """Return the host time of a call into PyTorch in forward and in backward, with tensors that take no time."""
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device)
    x = torch.randn(1, 4, 8, device=device)

    def calls_of(step: Callable[[], object]) -> int:
        with Recorder({}) as recorder:
            step()
        return sum(segment.calls for segment in recorder.segments)

    def forward() -> Tensor:
        out: Tensor = block(x)
        return out + x.view(1, 4, 2, 4).transpose(1, 2).transpose(1, 2).flatten(2)

    def both() -> None:
        forward().sum().backward()  # type: ignore[no-untyped-call]

    forward_s = _seconds(forward, device, 50)
    calls, all_calls = calls_of(forward), calls_of(both)
    backward_s = _seconds(both, device, 50) - forward_s
    return forward_s / calls, max(backward_s, 0.0) / (all_calls - calls)


def _ring_seconds(x: Tensor, device: torch.device) -> float:
    """Return the time in which each rank sends a tensor to the next one; with one rank, of a copy."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)

    def exchange() -> None:
        if ranks == 1:
            received.copy_(x)
            return
        ops: list[Any] = [
            dist.P2POp(dist.isend, x, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return _seconds(exchange, device, 1)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
