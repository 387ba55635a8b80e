"""Time and peak memory of a function on one device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_cp.recipes.benchmarks.trace import read_trace, record_trace
from lightning_cp.recipes.planning.timing import Step, Times, low_quartile, time_in_turn


def seconds_of(step: Step, device: torch.device) -> float:
    """Measure seconds of a call of `step`: the low quartile of 5 rounds of 5 calls."""
    (times,) = passes_in_turn({"": [step]}, rounds=5, calls=5, device=device).values()
    return times[0].wall_s


def passes_in_turn(
    steps: Mapping[Any, Sequence[Step]], *, rounds: int, calls: int, device: torch.device
) -> dict[Any, list[Times]]:
    """Measure seconds per call of each pass of each subject, which take turns: the low quartiles of the rounds."""
    passes = {(name, index): step for name, each in steps.items() for index, step in enumerate(each)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of functions that diffusers calls
        measured = time_in_turn(passes, device, rounds=rounds, calls=calls)
    lowest = {key: Times(*map(low_quartile, zip(*times))) for key, times in measured.items()}
    return {name: [lowest[name, index] for index in range(len(each))] for name, each in steps.items()}


def peak_bytes(step: Step, device: torch.device) -> int:
    """Measure the peak bytes that `step` allocates, without what was allocated before."""
    if device.type == "cpu":
        return read_trace(record_trace(step)).peak_bytes
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: `torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")
