"""Stage `memory`: peak allocation of attention on one rank, against a formula."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from lightning_cp.attention import context_parallel_attention, gathered
from lightning_cp.attention.merge import merge
from lightning_cp.comm.shards import shard_range, shard_sizes
from lightning_cp.compat.torch_names import fake_world
from lightning_cp.config import ContextParallelConfig
from lightning_cp.kernels import PartialAttention, PartialAttentionGrad, attend, attend_backward, choose_kernel
from lightning_cp.recipes.benchmarks.gpu.results import Measurement, Result
from lightning_cp.recipes.benchmarks.gpu.timing import peak_bytes
from lightning_cp.recipes.runs.ranks import modes

MEMORY_TOLERANCE = 1.1


class _Sizes(NamedTuple):
    """Sizes of one measurement.

    slices: number of slices of heads in which "allgather" gathers K and V. device: "cpu" or "cuda".
    """

    batch: int
    tokens: int
    ranks: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    slices: int
    device: str = "cpu"

    @property
    def local(self) -> int:
        return self.tokens // self.ranks

    @property
    def heads_of_slice(self) -> int:
        return -(-self.heads // self.slices)

    @property
    def merge_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def unit(self) -> int:
        """Bytes of the local query."""
        return self.batch * self.local * self.heads * self.head_dim * self.dtype.itemsize


def peak_memory(config: DictConfig) -> Iterator[Measurement]:
    """Measure forward and backward in every mode, against its buffers and the kernel's workspace."""
    for name in modes(config.memory.ranks):
        yield name, functools.partial(_measure_mode, config, name)


def _measure_mode(config: DictConfig, name: str, result: Result) -> None:
    device, settings, attention = torch.device(config.device), config.memory, config.attention
    dtype = getattr(torch, attention.dtype)
    key_bytes = 2 * attention.batch * settings.tokens * attention.heads * attention.head_dim * dtype.itemsize
    slices = min(attention.heads, -(-key_bytes // gathered.SLICE_BYTES[device.type]))
    heads = attention.heads, attention.head_dim
    sizes = _Sizes(attention.batch, settings.tokens, settings.ranks, *heads, dtype, slices, device.type)
    with fake_world(settings.ranks):
        peaks = _peaks(modes(settings.ranks)[name], sizes, device)
    units = buffer_units(name, sizes)
    workspaces = workspace_bytes(name, sizes, device) if units else (0, 0)
    for index, (passes, peak) in enumerate(zip(("forward", "backward"), peaks, strict=True)):
        cells = ["", "", ""]
        if units:
            expected = units[index] * sizes.unit + workspaces[index]
            share = peak / expected
            cells = [f"{workspaces[index] / 1e6:,.1f}", f"{expected / 1e6:,.1f}", f"{share:.2f}"]
            result.add_check(f"{name}, {passes}: peak memory over the formula", share, MEMORY_TOLERANCE)
        result.add_row(
            f"Peak memory of a rank of {settings.ranks}, {settings.tokens:,} tokens",
            ["mode", "pass", "peak MB", "workspace MB", "formula MB", "share"],
            [name, passes, f"{peak / 1e6:,.1f}", *cells],
        )


def buffer_units(name: str, sizes: _Sizes) -> tuple[float, float] | None:
    """Return the buffers allocated at once in forward and backward, in units of the local q; None for other modes."""
    ranks, widened = sizes.ranks, sizes.merge_dtype.itemsize // sizes.dtype.itemsize
    if name == "ring alltoall":
        # Forward: K and V of two chunks, a partial output, the merged output; in half precision, the first merge also
        # holds the first output before its conversion. Backward: K and V of two chunks; dq, dk
        # and dv from the kernel; the sum of dq; the sums of dK and dV of this rank, leaving, and arriving.
        return 4 + 1 + widened + (widened > 1), 4 + 3 + widened + 6 * widened
    if name == "ring allgather":
        # Gathered K and V: two slices, or the only one, and this rank's part of them before it is sent.
        one_slice = 2 * ranks * sizes.heads_of_slice / sizes.heads
        gathered_units = min(sizes.slices, 2) * (one_slice + one_slice / ranks)
        # Forward: outputs of all slices, and these concatenated. Backward: the same of dq, dK and dV. Of one slice: dq
        # and its sum; the kernel's inputs made contiguous, and its dk and dv; sums that leave, arrive, and are added.
        slice_of_dq = one_slice / (2 * ranks)
        slice_units = slice_of_dq * (4 + 3 * widened) + one_slice * (1 + 2 * widened)
        return gathered_units + 2, gathered_units + 6 + slice_units
    if name == "Ulysses":
        # Forward: q, k and v sharded by heads, the output, the same sent, received and in order. Backward: the gradient
        # of the output, and dq, dk, dv, sharded by heads; dq, dk, dv sent; the inputs of the kernel that it needs
        # contiguous. On CPU the pool keeps the buffer in which q, k and v are sent.
        pooled = 3 if sizes.device == "cpu" else 0
        return 7 + pooled, 9 + pooled
    return None


def workspace_bytes(name: str, sizes: _Sizes, device: torch.device) -> tuple[int, int]:
    """Measure the bytes that one kernel call allocates in addition to its output or gradients, forward and backward.

    The call has the shapes of the mode `name`, and no transfer around it. "ring alltoall" merges in forward: there, the
    larger of the kernel's and the merge's workspace counts.
    """
    queries, keys, heads = {
        "ring alltoall": (sizes.local, sizes.local, sizes.heads),
        "ring allgather": (sizes.local, sizes.tokens, sizes.heads_of_slice),
        "Ulysses": (sizes.tokens, sizes.tokens, -(-sizes.heads // sizes.ranks)),
    }[name]
    q, k, v, grad = (
        torch.randn(sizes.batch, n, heads, sizes.head_dim, device=device).to(sizes.dtype)
        for n in (queries, keys, keys, queries)
    )
    if name == "ring alltoall":  # in memory as they are sent: [b, h, s, d]
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    elif name == "Ulysses":  # [s, b, heads of q, k and v, d]
        q, k, v = torch.cat([q, k, v], 2).transpose(0, 1).contiguous().transpose(0, 1).chunk(3, 2)
    else:
        k, v = torch.cat([k, v], 2).transpose(0, 1).contiguous().transpose(0, 1).chunk(2, 2)
    kernel = choose_kernel("auto", q, None)
    options: dict[str, Any] = {"mask": None, "causal": False, "scale": sizes.head_dim**-0.5}
    part = attend(kernel, q, k, v, **options)

    def forward() -> None:
        attend(kernel, q, k, v, **options)

    def backward() -> None:
        attend_backward(kernel, PartialAttentionGrad(grad, None), q, k, v, part, **options)

    def merging() -> None:
        merge(total, part)

    total = PartialAttention(part.out.to(sizes.merge_dtype, copy=True), part.lse.clone())
    backward()
    merging()
    result_bytes = part.out.nbytes, q.nbytes + k.nbytes + v.nbytes
    workspaces = [peak_bytes(step, device) - size for step, size in zip((forward, backward), result_bytes, strict=True)]
    if name == "ring alltoall":
        workspaces[0] = max(workspaces[0], peak_bytes(merging, device))
    return max(0, workspaces[0]), max(0, workspaces[1])


def _peaks(mode: ContextParallelConfig, sizes: _Sizes, device: torch.device) -> tuple[int, int]:
    """Measure the peak bytes allocated by forward and by backward, without what was allocated before."""
    local = len(shard_range(sizes.tokens, sizes.ranks, dist.get_rank()))
    shape = (sizes.batch, local, sizes.heads, sizes.head_dim)
    *leaves, grad = (torch.randn(shape, device=device).to(sizes.dtype).requires_grad_(i < 3) for i in range(4))
    lengths = shard_sizes(sizes.tokens, sizes.ranks)
    out: list[Tensor] = []

    def forward() -> None:
        q, k, v = leaves
        out.append(context_parallel_attention(q, k, v, parallel_config=mode, q_lengths=lengths, kv_lengths=lengths))

    def backward() -> None:
        torch.autograd.grad(out.pop(), leaves, grad)

    forward()
    backward()
    return peak_bytes(forward, device), peak_bytes(backward, device)
