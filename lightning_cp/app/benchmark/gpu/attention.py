"""Stages that measure attention on one device: errors, the merge, one rank's work, memory."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lightning_cp.app.benchmark.gpu.results import Check, ResultTable, StageResult
from lightning_cp.app.benchmark.measure import measure
from lightning_cp.app.benchmark.report import Row, rows_of
from lightning_cp.app.benchmark.subject import HEADS_CALL, QUERIES_CALL, modes
from lightning_cp.app.benchmark.trace import read_trace, record
from lightning_cp.app.benchmark.workloads import one_rank
from lightning_cp.attention import context_parallel_attention, gathered
from lightning_cp.attention.merge import merge
from lightning_cp.comm.shards import shard_range, shard_sizes
from lightning_cp.config import ContextParallelConfig
from lightning_cp.kernels import Kernel, PartialAttention, PartialAttentionGrad, attend, attend_backward
from lightning_cp.kernels.choice import KERNELS

ERROR_LIMITS = {  # RMS error relative to the largest value; float32 may use TF32 on a GPU
    torch.float64: 1e-12,
    torch.float32: 2e-3,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}
_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped heads": {"key_heads": 2},
    "key mask": {"masked": True},
}
RATIO_GOAL, BANDWIDTH_GOAL, MEMORY_TOLERANCE = 1.03, 0.8, 1.1


def kernel_errors(config: DictConfig, result: StageResult, save: Callable[[], None]) -> None:
    """Compare every kernel, dtype and case with softmax attention in float64: output, LSE and gradients."""
    device, rows = torch.device(config.device), []
    for kernel in (x for x in KERNELS if x.device_type in ("any", device.type)):
        for dtype, limit in ERROR_LIMITS.items():
            found: dict[str, str] = {}
            for case, options in _CASES.items():
                try:
                    error = _kernel_error(kernel, dtype, device, config.errors.tokens, **options)
                except Exception as failure:  # of any kind: the other kernels are measured all the same
                    error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:120]}"
                    result.checks.append(Check(f"{kernel.name}, {_short(dtype)}, {case}", error, "runs", False))
                found[case] = error if isinstance(error, str) else f"{error:.1e}"
                if not isinstance(error, str):
                    name = f"{kernel.name}, {_short(dtype)}, {case}: error"
                    result.checks.append(Check(name, f"{error:.1e}", f"≤ {limit:.0e}", error <= limit))
            rows.append([kernel.name, _short(dtype), *found.values()])
            save()
    title = "Largest RMS error of output, LSE and gradients against float64, relative to the largest value"
    result.tables.append(ResultTable(title, ["kernel", "dtype", *_CASES], rows))


def _kernel_error(
    kernel: Kernel,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    *,
    causal: bool = False,
    key_heads: int = 4,
    masked: bool = False,
) -> float | str:
    """The largest relative RMS error, or why the kernel refuses the case."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, tokens, heads, 64) for heads in (4, key_heads, key_heads, 4)]
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    mask = None
    if masked:
        mask = torch.rand((2, 1, 1, tokens), generator=generator).to(device) > 0.3
    reason = kernel.refusal(q, mask)
    if reason is not None:
        return reason
    given: dict[str, Any] = {"mask": mask, "causal": causal, "scale": 64**-0.5}
    part = attend(kernel, q, k, v, **given)
    grads = attend_backward(kernel, PartialAttentionGrad(grad, None), q, k, v, part, **given)
    expected = _float64_attention(q, k, v, grad, **given)
    pairs = zip((*part, *grads), expected, strict=True)
    return max(_relative_error(mine, exact) for mine, exact in pairs)


def _float64_attention(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, mask: Tensor | None, causal: bool, scale: float
) -> list[Tensor]:
    """out, lse, dq, dk, dv of softmax attention in float64. q, k, v, grad: [b, s, h, d]."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    query, key, value = leaves
    groups = q.shape[2] // k.shape[2]
    key, value = key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)
    grads = torch.autograd.grad(out, leaves, grad.double())
    return [out.detach(), scores.logsumexp(-1).transpose(1, 2).detach(), *grads]


def _relative_error(actual: Tensor, exact: Tensor) -> float:
    error = (actual.double() - exact).square().mean().sqrt() / exact.abs().max()
    return float(error.nan_to_num(nan=torch.inf))


def merge_bandwidth(config: DictConfig, result: StageResult, save: Callable[[], None]) -> None:
    """Time the merge of two partial results, as a share of the bandwidth of a plain copy."""
    device, sizes, rows = torch.device(config.device), config.attention, []
    source = torch.randn(config.merge.copy_bytes // 4, device=device)
    copied = torch.empty_like(source)
    copy_rate = 2 * source.nbytes / seconds_of(lambda: copied.copy_(source), device)
    for tokens in config.merge.lengths:
        for dtype in (torch.float32, torch.bfloat16):
            shape = (sizes.batch, tokens, sizes.heads, sizes.head_dim)
            a = PartialAttention(torch.randn(shape, device=device), torch.randn(shape[:3], device=device))
            b = PartialAttention(torch.randn(shape, device=device).to(dtype), torch.randn(shape[:3], device=device))
            moved = a.out.numel() * (8 + dtype.itemsize) + a.lse.numel() * 12
            rate = moved / seconds_of(functools.partial(merge, a, b), device)
            rows.append([f"{tokens:,}", _short(dtype), f"{rate / 1e9:,.0f}", f"{rate / copy_rate:.2f}"])
            goal = f"≥ {BANDWIDTH_GOAL}" if device.type == "cuda" and tokens == max(config.merge.lengths) else ""
            passed = rate >= BANDWIDTH_GOAL * copy_rate if goal else None
            name = f"merge of {tokens:,} tokens in {_short(dtype)}: share of the copy's bandwidth"
            result.checks.append(Check(name, f"{rate / copy_rate:.2f}", goal, passed))
            save()
    title = f"Merge of two partial results (a copy moves {copy_rate / 1e9:,.0f} GB/s)"
    result.tables.append(ResultTable(title, ["tokens", "dtype of the second", "GB/s", "share of the copy"], rows))


def one_rank_times(config: DictConfig, result: StageResult, save: Callable[[], None]) -> None:
    """Time what one rank computes in every mode, against one attention call with the same FLOPs.

    The process group is a fake that sends nothing, so only computation and memory traffic are measured.
    """
    device, own = torch.device(config.device), config.one_rank
    for ranks in own.ranks:
        for tokens in own.lengths:
            for backward in (False, True):
                sizes = OmegaConf.merge(config.attention, {"backward": backward})
                with fake_world(ranks):
                    subjects = one_rank(sizes, tokens, device)  # type: ignore[arg-type]
                    found = measure(subjects, repeats=own.repeats, seconds=own.seconds, device=device)
                workload = "one_rank" if backward else "one_rank forward"
                rows = rows_of(workload, tokens, ranks, found)
                result.rows += [dict(row) for row in rows]
                result.checks += _ratio_checks(rows, on_gpu=device.type == "cuda")
                save()


def _ratio_checks(rows: list[Row], *, on_gpu: bool) -> Iterator[Check]:
    """One check for each mode: its time over the time of a single call with the same FLOPs."""
    times = {row["subject"]: row["median_s"] for row in rows}
    tokens, ranks, passes = rows[0]["tokens"], rows[0]["ranks"], "forward"
    if rows[0]["workload"] == "one_rank":
        passes = "forward and backward"
    for name in modes(ranks):
        call = times[HEADS_CALL if name == "Ulysses" else QUERIES_CALL]
        mine = times[name]
        if mine is None or call is None:
            reason = next(row["refused"] for row in rows if row["subject"] in (name, QUERIES_CALL) and row["refused"])
            yield Check(f"{name}, {ranks} ranks, {tokens:,} tokens, {passes}", reason, "runs", False)
            continue
        ratio = mine / call
        goal = f"≤ {RATIO_GOAL}" if on_gpu else ""
        title = f"{name}, {ranks} ranks, {tokens:,} tokens, {passes}: time over one call"
        yield Check(title, f"{ratio:.3f}", goal, ratio <= RATIO_GOAL if goal else None)


def peak_memory(config: DictConfig, result: StageResult, save: Callable[[], None]) -> None:
    """Measure the peak allocation of a step in every mode, against the sum of the buffers that the step needs."""
    device, sizes = torch.device(config.device), config.attention
    ranks, tokens, dtype = config.memory.ranks, config.memory.tokens, getattr(torch, config.attention.dtype)
    unit = sizes.batch * (tokens // ranks) * sizes.heads * sizes.head_dim * dtype.itemsize
    wide = max(1, 4 // dtype.itemsize)
    gathered_units = (_gathered_units(2 * ranks * unit, sizes.heads, device) / unit).tolist()
    rows = []
    with fake_world(ranks):
        for name, mode in modes(ranks).items():
            units = _peak_units(name, ranks, wide, *gathered_units)
            if not units:
                continue
            peaks = _peaks(mode, sizes, tokens, device)
            for passes, expected, peak in zip(("forward", "backward"), units, peaks, strict=True):
                share = peak / (expected * unit)
                rows.append([name, passes, f"{peak / 1e6:,.1f}", f"{expected * unit / 1e6:,.1f}", f"{share:.2f}"])
                title = f"{name}, {passes}: peak memory over the formula"
                result.checks.append(Check(title, f"{share:.2f}", f"≤ {MEMORY_TOLERANCE}", share <= MEMORY_TOLERANCE))
    title = f"Peak memory of a rank of {ranks}, {tokens:,} tokens"
    result.tables.append(ResultTable(title, ["mode", "pass", "peak MB", "formula MB", "share"], rows))
    save()


def _peak_units(name: str, ranks: int, wide: int, held: float, one_slice: float) -> tuple[float, float] | None:
    """Buffers that are alive at once in forward and in backward, in units of the local q; None for other modes.

    Args:
        wide: size of an element that sums are kept in, over the size of the inputs' elements.
        held, one_slice: units of gathered K and V that "allgather" holds, and that one slice of heads has.
    """
    if name == "ring alltoall":
        # Forward: K and V of two chunks, a partial output, the merged output. Backward: K and V of two chunks; dq, dk
        # and dv from the kernel; the sum of dq; the sums of dK and dV of this rank, leaving, and arriving.
        return 4 + 1 + wide, 4 + 3 + wide + 6 * wide
    if name == "ring allgather":
        # Forward: outputs of all slices, and these concatenated. Backward: the same of dq, the sums of dK and dV and
        # their conversion; of one slice: dq and its sum, the kernel's inputs made contiguous and its dk and dv, and the
        # sums that leave and arrive.
        converted, slice_of_dq = 2 if wide > 1 else 0, one_slice / (2 * ranks)
        of_a_slice = slice_of_dq * (4 + wide) + one_slice * (1 + 2 * wide * (ranks - 1) / ranks)
        return held + 2, held + 2 + 2 * wide + converted + of_a_slice
    if name == "Ulysses":
        # Forward: q, k and v sharded by heads, the same packed, the output. Backward: the gradient of the output, and
        # dq, dk, dv, sharded by heads; dq, dk, dv packed; the inputs of the kernel that it needs contiguous.
        return 7, 9
    return None


def _gathered_units(total: int, heads: int, device: torch.device) -> Tensor:
    """Bytes of gathered K and V: of all slices that "allgather" holds (two in transit, one put together), and of one.

    Args: total: bytes of K and V of all ranks and heads.
    """
    slices = min(heads, -(-total // gathered.SLICE_BYTES[device.type]))
    one_slice = -(-heads // slices) * (total // heads)
    return torch.tensor([one_slice if slices == 1 else 3 * one_slice, one_slice], dtype=torch.float64)


def _peaks(mode: ContextParallelConfig, sizes: DictConfig, tokens: int, device: torch.device) -> tuple[int, int]:
    """Bytes allocated at once by forward and by backward, beyond what was allocated before."""
    ranks, dtype = dist.get_world_size(), getattr(torch, sizes.dtype)
    local = len(shard_range(tokens, ranks, dist.get_rank()))
    shape = (sizes.batch, local, sizes.heads, sizes.head_dim)
    *leaves, grad = (torch.randn(shape, device=device).to(dtype).requires_grad_(i < 3) for i in range(4))
    lengths = shard_sizes(tokens, ranks)
    out: list[Tensor] = []

    def forward() -> None:
        q, k, v = leaves
        out.append(context_parallel_attention(q, k, v, parallel_config=mode, q_lengths=lengths, kv_lengths=lengths))

    def backward() -> None:
        torch.autograd.grad(out.pop(), leaves, grad)

    forward()
    backward()
    return _peak_bytes(forward, device), _peak_bytes(backward, device)


def _peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    if device.type == "cpu":
        return read_trace(record(step)).peak_bytes
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def seconds_of(step: Callable[[], object], device: torch.device, *, repeats: int = 20) -> float:
    """The median time of `step`, by CUDA events on a GPU."""
    for _ in range(3):
        step()
    if device.type == "cpu":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]  # type: ignore[no-untyped-call]
    for begin, end in pairs:
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median([float(begin.elapsed_time(end)) for begin, end in pairs]) / 1e3


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """A default process group of `ranks` ranks whose collectives send nothing; this process is rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
