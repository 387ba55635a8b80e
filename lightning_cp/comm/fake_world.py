"""A world of ranks of which only one exists: collectives send nothing. For dry runs and measurements of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_cp.compat.torch_names import fake_store


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """Create a default process group of `ranks` ranks, in which this process is `rank`; destroyed at the end."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
