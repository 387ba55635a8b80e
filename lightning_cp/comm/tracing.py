"""PyTorch profiler with marks for exchanges and waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_cp.comm.stats import STATS


@contextmanager
def traced(*, memory: bool = False) -> Iterator[profile]:
    """Profile the code in the context, including GPU work that it launched. Args: memory: record allocations too."""
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with profile(activities=[ProfilerActivity.CPU, *gpu], profile_memory=memory) as profiler:
        STATS.traced = True
        try:
            yield profiler
            if gpu:
                torch.cuda.synchronize()
        finally:
            STATS.traced = False
