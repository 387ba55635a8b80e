"""Measure the rates of a device for the planner: products, attention, memory, links between ranks, and the host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.comm.transfer import all_gather_tensor
from lightning_cp.launch import Machine
from lightning_cp.planning.devices import GB, MEASURED, Device
from lightning_cp.planning.recorder import Recorder, Segment
from lightning_cp.planning.recording import adamw
from lightning_cp.planning.step import Compute
from lightning_cp.recipes.planning.timing import Step, low_quartile, machine_name, time_in_turn
from lightning_cp.recipes.runs.ranks import on_ranks, run_on_ranks
from lightning_cp.recipes.settings.table import SettingsError

_ROUNDS = 5
_LIMIT_S = 1800


def calibrate(ranks: int, *, is_gpu: bool, folder: Path) -> Path:
    """Measure this machine's rates with `ranks` ranks. Returns: the file of the device, `device.yaml` in `folder`.

    Raises:
        SettingsError: there are not as many GPUs.
        RuntimeError: a rank failed.
    """
    if is_gpu and ranks > Machine.this().gpus:
        raise SettingsError(
            f"ranks={ranks} need a GPU each: there are {Machine.this().gpus} here; use fewer ranks, or gpu=cpu"
        )
    settings = {"device": "cuda" if is_gpu else "cpu"}
    rows, outcome = run_on_ranks(measure_device, settings, ranks, limit_s=_LIMIT_S, threads=0 if is_gpu else 1)
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure.describe())
    result = folder / "device.yaml"
    with atomic_file(result) as scratch_file:
        OmegaConf.save(rows[0], scratch_file)
    return result


@on_ranks
def measure_device(config: DictConfig) -> Iterator[dict[str, Any]]:
    """Measure on every rank at the same time, and yield the device."""
    device = torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    yield asdict(measured_rates(device))


def measured_rates(device: torch.device) -> Device:
    """Return the rates of this machine. Ranks: all, at the same time."""
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    rows, width, inner = (8192, 8192, 8192) if is_gpu else (1024, 2048, 512)
    tokens, heads, head_dim = (16384, 24, 128) if is_gpu else (1024, 8, 64)
    a = torch.randn(rows, inner, dtype=dtype, device=device)
    b = torch.randn(inner, width, dtype=dtype, device=device)
    qkv = torch.randn(3, 1, heads, tokens, head_dim, dtype=dtype, device=device, requires_grad=True)
    small = torch.zeros((1 << 14), device=device)
    large = torch.zeros((1 << 26) if is_gpu else (1 << 22), device=device)
    pointwise = _pointwise(torch.randn(1, tokens, 3072 if is_gpu else 1024, dtype=dtype, device=device))
    moved = sum(x.moved_bytes for x in _recorded(pointwise).events if isinstance(x, Compute))
    (calls, all_calls), forward, both = _small_block(device)
    few = 1 if is_gpu else 5  # 0.1 seconds, in which ranks that share a core take turns
    steps: dict[str, tuple[Step, int]] = {  # with the calls of a round
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
    times = time_in_turn({name: _repeated(*step) for name, step in steps.items()}, device, rounds=_ROUNDS)
    s = {name: low_quartile([x.wall_s for x in times[name]]) / repeats for name, (_, repeats) in steps.items()}
    products = 2 * rows * inner * width / s["products"]
    attention = 14 * heads * tokens**2 * head_dim / s["attention"]
    link = (large.nbytes - small.nbytes) / max(s["large"] - s["small"], 1e-9)
    ranks = dist.get_world_size()
    shards = (ranks - 1 + (ranks - 1) / ranks) * large.nbytes / s["shards"]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = torch.cuda.get_device_properties(device).total_memory if is_gpu else host // ranks
    return Device(
        machine_name(),
        products / 1e12,
        total / GB,
        moved / s["pointwise"] / GB,
        link / GB,
        link / GB,
        node_ranks=max(ranks, 2),
        matmul_share=1.0,
        attention_share=attention / products,
        shards_share=shards / link if ranks > 1 else 1.0,
        call_us=1e6 * s["forward"] / calls,
        backward_call_us=1e6 * max(s["both"] - s["forward"], 0.0) / (all_calls - calls),
        exchange_us=50.0 if is_gpu else 0.0,
        kernel_us=1e6 * s["kernel"] if is_gpu else 0.0,
        latency_us=1e6 * max(s["small"] - small.nbytes / link, 0.0),
        kind="cuda" if is_gpu else "cpu",
        capability=torch.cuda.get_device_capability(device) if is_gpu else (9, 0),
        source=MEASURED,
    )


def _repeated(step: Step, count: int) -> Step:
    def repeat() -> None:
        for _ in range(count):
            step()

    return repeat


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
