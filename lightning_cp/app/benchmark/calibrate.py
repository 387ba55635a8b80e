"""Measure the rates of a device for the planner: products, attention, memory, links between ranks, and the host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from lightning_cp.app.benchmark.measure import low_quartile, max_over_ranks, synchronize
from lightning_cp.app.benchmark.report import machine_name
from lightning_cp.app.settings.target import reads_settings
from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.comm.transfer import all_gather_tensor
from lightning_cp.launch.rendezvous import init_process_group
from lightning_cp.planning.devices import GB, MEASURED, Device, as_figures
from lightning_cp.planning.recorder import Recorder, Segment
from lightning_cp.planning.recording import adamw
from lightning_cp.planning.step import Compute

_REPEATS = 5


@reads_settings
def calibrate(config: DictConfig) -> None:
    """Measure on every rank at the same time; rank 0 writes the device as YAML."""
    is_gpu = config.device == "cuda"
    if is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group("nccl" if is_gpu else "gloo")
    device = measured_device(torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu"))
    if dist.get_rank() == 0:
        with atomic_file(Path(config.result)) as scratch:
            OmegaConf.save(as_figures(device), scratch)
    dist.destroy_process_group()


def measured_device(device: torch.device) -> Device:
    """Return the rates of this machine. Ranks: all, at the same time."""
    calibration = Calibration(device)
    calibration.measure(_REPEATS)
    return calibration.result()


class Calibration:
    """Measure the rates of a device, once or again between other measurements. Ranks: all, at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device, is_gpu = device, device.type == "cuda"
        dtype = torch.bfloat16 if is_gpu else torch.float32
        rows, width, inner = (8192, 8192, 8192) if is_gpu else (1024, 2048, 512)
        tokens, heads, head_dim = (16384, 24, 128) if is_gpu else (1024, 8, 64)
        a = torch.randn(rows, inner, dtype=dtype, device=device)
        b = torch.randn(inner, width, dtype=dtype, device=device)
        qkv = torch.randn(3, 1, heads, tokens, head_dim, dtype=dtype, device=device, requires_grad=True)
        small = torch.zeros((1 << 14), device=device)
        large = torch.zeros((1 << 26) if is_gpu else (1 << 22), device=device)
        self._flops, self._attention_flops = 2 * rows * inner * width, 14 * heads * tokens**2 * head_dim
        self._small_bytes, self._large_bytes = small.numel() * 4, large.numel() * 4
        pointwise = _pointwise(torch.randn(1, tokens, 3072 if is_gpu else 1024, dtype=dtype, device=device))
        self._moved = sum(x.moved_bytes for x in _recorded(pointwise).events if isinstance(x, Compute))
        self._calls, forward, both = _small_block(device)
        few = 1 if is_gpu else 5  # 0.1 seconds, in which ranks that share a core take turns
        self._steps: dict[str, tuple[Callable[[], object], int]] = {
            "products": (lambda: a @ b, few),
            "attention": (lambda: _attention_with_gradients(qkv), few),
            "pointwise": (pointwise, few),
            "kernel": (lambda: small.add_(1), 200),
            "forward": (forward, 100 * few),
            "both": (both, 50 * few),
            "small": (_ring_exchange(small), 20 * few),
            "large": (_ring_exchange(large), few),
            "shards": (_collectives_of_shards(large), 1),
        }
        self._times: dict[str, list[float]] = {name: [] for name in self._steps}
        for step, _ in self._steps.values():
            step()
            step()

    def measure(self, rounds: int) -> None:
        """Measure each rate so many more times, in turn, on the slowest rank."""
        for name, (step, repeats) in list(self._steps.items()) * rounds:
            synchronize(self._device)
            dist.barrier()
            started = time.perf_counter()
            for _ in range(repeats):
                step()
            synchronize(self._device)
            self._times[name].append(max_over_ranks([time.perf_counter() - started])[0] / repeats)

    def result(self) -> Device:
        """Return the device, from the low quartiles of what was measured."""
        is_gpu, seconds = self._device.type == "cuda", {name: low_quartile(x) for name, x in self._times.items()}
        products, attention = self._flops / seconds["products"], self._attention_flops / seconds["attention"]
        link = (self._large_bytes - self._small_bytes) / max(seconds["large"] - seconds["small"], 1e-9)
        ranks, (calls, all_calls) = dist.get_world_size(), self._calls
        shards = (ranks - 1 + (ranks - 1) / ranks) * self._large_bytes / seconds["shards"]
        backward_s = max(seconds["both"] - seconds["forward"], 0.0)
        total = torch.cuda.get_device_properties(self._device).total_memory if is_gpu else _memory_bytes() // ranks
        return Device(
            machine_name(),
            products / 1e12,
            total / GB,
            self._moved / seconds["pointwise"] / GB,
            link / GB,
            link / GB,
            node_ranks=max(ranks, 2),
            matmul_share=1.0,
            attention_share=attention / products,
            shards_share=shards / link if ranks > 1 else 1.0,
            call_us=1e6 * seconds["forward"] / calls,
            backward_call_us=1e6 * backward_s / (all_calls - calls),
            exchange_us=50.0 if is_gpu else 0.0,
            kernel_us=1e6 * seconds["kernel"] if is_gpu else 0.0,
            latency_us=1e6 * max(seconds["small"] - self._small_bytes / link, 0.0),
            kind="cuda" if is_gpu else "cpu",
            capability=torch.cuda.get_device_capability(self._device) if is_gpu else (9, 0),
            source=MEASURED,
        )


def _attention_with_gradients(qkv: Tensor) -> None:
    q, k, v = qkv.unbind()
    torch.autograd.backward(scaled_dot_product_attention(q, k, v), q.detach())


def _pointwise(x: Tensor) -> Callable[[], None]:
    """Return a training step of what a block computes between its products, and of AdamW."""
    x.requires_grad_()
    scale, shift, gate = torch.zeros(3, x.shape[-1], dtype=x.dtype, device=x.device, requires_grad=True).unbind()
    optimizer = adamw([x])  # type: ignore[list-item]

    def step() -> None:
        changed = layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        out = x + gate * gelu(changed, approximate="tanh")
        torch.autograd.backward(out, x.detach(), inputs=[x, scale, shift, gate])
        optimizer.step()

    return step


def _recorded(step: Callable[[], object]) -> Segment:
    """Run a step. Returns: what it did."""
    recorder = Recorder({})
    with recorder:
        step()
    return recorder.segments[0]


def _small_block(device: torch.device) -> tuple[tuple[int, int], Callable[[], Tensor], Callable[[], None]]:
    """Return work of the host with tensors that take no time.

    Returns: the numbers of calls into PyTorch in a forward and in a forward with backward, and functions for both.
    """
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device)
    x = torch.randn(1, 4, 8, device=device)

    def forward() -> Tensor:
        out: Tensor = block(x)
        return out + x.view(1, 4, 2, 4).transpose(1, 2).transpose(1, 2).flatten(2)

    def both() -> None:
        forward().sum().backward()  # type: ignore[no-untyped-call]

    return (_recorded(forward).calls, _recorded(both).calls), forward, both


def _ring_exchange(x: Tensor) -> Callable[[], None]:
    """Return a function in which each rank sends a tensor to the next one; with one rank, that copies it."""
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

    return exchange


def _collectives_of_shards(x: Tensor) -> Callable[[], None]:
    """Return a function that gathers a tensor of each rank, and sums and scatters one of this size, as FSDP2 does."""
    reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    ranks = dist.get_world_size()
    whole, shard = x.new_empty(ranks * x.numel()), x.new_empty(x.numel() // ranks)

    def step() -> None:
        all_gather_tensor(whole, x)
        reduce_scatter_tensor(shard, x[: shard.numel() * ranks])

    return step


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
