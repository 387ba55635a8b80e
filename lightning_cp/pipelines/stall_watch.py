"""Stall watch of the parallel pipelines of a process: one for its process group, also if a strategy has started it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.distributed as dist

from lightning_cp.compat.torch_names import default_timeout
from lightning_cp.launch.stall import StallWatch, current_watch, stop_watch, watch_stalls
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.undoable import Undo


def share_watch(stall_s: float | None, ranks: SampleGroups) -> Iterator[Undo]:
    """Watch the calls of a parallel pipeline. A watch that runs is used as it is; its `stall_s` holds.

    Args:
        stall_s: seconds until a stalled collective is reported; None: never.
        ranks: ranks that share a sample; a rank alone has no collectives to watch.
    Yields: a function that ends the watch when nothing else uses it.
    """
    if stall_s is None or ranks.sample.context_size == 1 or dist.get_backend() == "fake":
        return
    watch = current_watch()
    if watch is not None:
        watch.users += 1
    else:
        watch = watch_stalls(after_s=stall_s, timeout_s=default_timeout().total_seconds())
    if watch is not None:
        yield partial(_leave, watch)


def _leave(watch: StallWatch) -> None:
    watch.users -= 1
    if watch.users == 0 and watch is current_watch():
        stop_watch()
