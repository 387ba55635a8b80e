"""Stages that time attention on one device: the merge, one rank's work, and the ring's for long sequences."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from lightning_cp.attention.merge import merge
from lightning_cp.compat.torch_names import fake_world
from lightning_cp.kernels import PartialAttention
from lightning_cp.recipes.benchmarks.gpu.results import Check, Measurement, Result
from lightning_cp.recipes.benchmarks.gpu.timing import dtype_name, seconds_of
from lightning_cp.recipes.benchmarks.measure import Figures, measure_subjects
from lightning_cp.recipes.benchmarks.subject import HEADS_CALL, QUERIES_CALL
from lightning_cp.recipes.benchmarks.workloads import one_rank
from lightning_cp.recipes.runs.ranks import modes

RATIO_GOAL, BANDWIDTH_GOAL = 1.03, 0.8
_RING_MODES = ("ring allgather", "ring alltoall")


def merge_bandwidth(config: DictConfig) -> Iterator[Measurement]:
    """Time the merge of two partial results, as a fraction of the bandwidth of a plain copy."""
    for tokens in config.merge.lengths:
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{tokens} tokens, {dtype_name(dtype)}", functools.partial(_time_merge, config, tokens, dtype)


def _time_merge(config: DictConfig, tokens: int, dtype: torch.dtype, result: Result) -> None:
    device, sizes = torch.device(config.device), config.attention
    source = torch.randn(config.merge.copy_bytes // 4, device=device)
    copied = torch.empty_like(source)
    copy_rate = 2 * source.nbytes / seconds_of(lambda: copied.copy_(source), device)
    shape = (sizes.batch, tokens, sizes.heads, sizes.head_dim)
    a = PartialAttention(torch.randn(shape, device=device), torch.randn(shape[:3], device=device))
    b = PartialAttention(torch.randn(shape, device=device).to(dtype), torch.randn(shape[:3], device=device))
    moved = a.out.numel() * (8 + dtype.itemsize) + a.lse.numel() * 12
    rate = moved / seconds_of(functools.partial(merge, a, b), device)
    fraction = rate / copy_rate
    result.add_row(
        "Merge of two partial results",
        ["tokens", "dtype of the second", "GB/s", "GB/s of a copy", "share of the copy"],
        [f"{tokens:,}", dtype_name(dtype), f"{rate / 1e9:,.0f}", f"{copy_rate / 1e9:,.0f}", f"{fraction:.2f}"],
    )
    goal = f"≥ {BANDWIDTH_GOAL}" if device.type == "cuda" and tokens == max(config.merge.lengths) else ""
    name = f"merge of {tokens:,} tokens in {dtype_name(dtype)}: share of the copy's bandwidth"
    result.checks.append(Check(name, f"{fraction:.2f}", goal, fraction >= BANDWIDTH_GOAL if goal else None))


def one_rank_times(config: DictConfig) -> Iterator[Measurement]:
    """Time one rank's work in every mode, relative to one attention call with the same FLOPs.

    The process group is a fake that sends nothing, so only computation and memory traffic are measured.
    """
    for ranks in config.one_rank.ranks:
        for tokens in config.one_rank.lengths:
            for backward in (False, True):
                name = f"{ranks} ranks, {tokens} tokens{', backward' if backward else ''}"
                yield name, functools.partial(_time_one_rank, config, ranks, tokens, backward)


def _time_one_rank(config: DictConfig, ranks: int, tokens: int, backward: bool, result: Result) -> None:
    device, settings = torch.device(config.device), config.one_rank
    sizes = OmegaConf.merge(config.attention, {"backward": backward})
    with fake_world(ranks):
        subjects = one_rank(sizes, tokens, device)  # type: ignore[arg-type]
        figures = measure_subjects(subjects, repeats=settings.repeats, seconds=settings.seconds, device=device)
    passes = "forward and backward" if backward else "forward"
    columns = ["tokens", "ranks", "mode", "passes", "ms", "time over one call"]
    for name in modes(ranks):
        call = HEADS_CALL if name == "Ulysses" else QUERIES_CALL
        title = f"{name}, {ranks} ranks, {tokens:,} tokens, {passes}: time over one call"
        # below the largest length, the host launches more slowly than the device computes: see the stage `host`
        ratio = _add_ratio(title, figures[name], figures[call], device, tokens == max(settings.lengths), result)
        if ratio is not None:
            cells = [f"{tokens:,}", str(ranks), name, passes, f"{1e3 * figures[name].median_s:.2f}", f"{ratio:.3f}"]
            result.add_row("Attention of one rank, over one call with the same FLOPs", columns, cells)


def _add_ratio(
    title: str, mode: Figures, call: Figures, device: torch.device, has_goal: bool, result: Result
) -> float | None:
    """Check the time of a mode relative to that of a call; None if one of them does not run."""
    if mode.refused or call.refused:
        result.checks.append(Check(title, mode.refused or call.refused, "runs", False))
        return None
    ratio = mode.median_s / call.median_s
    result.add_check(title, ratio, RATIO_GOAL if has_goal and device.type == "cuda" else None, "{:.3f}")
    return ratio


def long_contexts(config: DictConfig) -> Iterator[Measurement]:
    """Time the ring's work of one rank, forward and backward, for long sequences, and measure its peak memory."""
    for tokens in config.long_context.lengths:
        yield f"{tokens} tokens", functools.partial(_time_long_context, config, tokens)


def _time_long_context(config: DictConfig, tokens: int, result: Result) -> None:
    """Add one row for each mode, or one with the reason if the memory does not suffice."""
    device, settings, sizes = torch.device(config.device), config.long_context, config.attention
    title = f"Ring attention of one rank of {settings.ranks}, forward and backward"
    columns = ["tokens", "mode", "seconds", "time over one call", "peak GB"]
    needed, free = long_context_bytes(sizes, tokens), free_bytes(device)
    if free is not None and needed > free:
        reason = f"not measured: may need {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
        result.add_row(title, columns, [f"{tokens:,}", reason, "", "", ""])
        return
    with fake_world(settings.ranks):
        subjects = [x for x in one_rank(sizes, tokens, device) if x.name in (QUERIES_CALL, *_RING_MODES)]
        figures = measure_subjects(subjects, repeats=settings.repeats, seconds=0.0, device=device)
    for name in (QUERIES_CALL, *_RING_MODES):
        mode, has_goal = figures[name], name != QUERIES_CALL
        check = f"{name}, {settings.ranks} ranks, {tokens:,} tokens: time over one call"
        ratio = _add_ratio(check, mode, figures[QUERIES_CALL], device, has_goal, result)
        if ratio is not None:
            cells = [f"{mode.median_s:.3f}", f"{ratio:.3f}", f"{mode.peak_bytes / 1e9:.2f}"]
            result.add_row(title, columns, [f"{tokens:,}", name, *cells])


def long_context_bytes(sizes: DictConfig, tokens: int) -> int:
    """Return a bound of the memory of `_time_long_context`, in tensors of all tokens.

    Inputs are drawn whole: 4 tensors and one in float32. At the same time, the call has all keys and values, and their
    gradients while it runs; the shards of the modes and their buffers are at most 2 more at 8 ranks.
    """
    itemsize: int = getattr(torch, sizes.dtype).itemsize
    elements = int(sizes.batch * tokens * sizes.heads * sizes.head_dim)
    return elements * ((4 + 4 + 2) * itemsize + 4)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, with what torch's allocator holds unused; None if it is unknown."""
    if device.type == "cpu":
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if sys.platform == "linux" else ()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
