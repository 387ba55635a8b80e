"""A rank that takes no part in a vote of a pipeline: the others raise a clear error after the time-out of the group."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.compat.torch_names import set_timeout
from tests.harness import RankPool
from tests.pipelines import PIPES

_TIMEOUT_S = 5


def _missing(rank: int, world: int, folder: str) -> list[str]:
    """What the next two calls raise if rank 1 makes only one call. A rank that has ended makes a file."""
    pipe = PIPES["flux"].pipe()
    dist.barrier()
    _set_timeout(_TIMEOUT_S)  # as with init_process_group(timeout=…), but imports may take longer than that
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
    PIPES["flux"].draw(pipe)
    said = list[str]()
    while rank == 1 and len(os.listdir(folder)) < world - 1:
        time.sleep(0.05)
    for _ in range(2 if rank != 1 else 0):
        with pytest.raises(RuntimeError) as error:
            PIPES["flux"].draw(pipe)
        said.append(str(error.value))
    Path(folder, str(rank)).touch()
    return said


def _set_timeout(seconds: float) -> None:
    set_timeout(timedelta(seconds=seconds), dist.group.WORLD)


@pytest.mark.full
def test_a_rank_without_a_vote_ends_the_others_in_time(run_ranks: RankPool, tmp_path: Path) -> None:
    first, _, last = run_ranks(3, _missing, str(tmp_path))
    for said, again in (first, last):
        assert said.startswith("another rank did not take part in an exchange before the time-out of the process group")
        assert "this FluxPipeline can make no further call" in again
