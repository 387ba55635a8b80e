"""A rank that returns while others are in a collective with it: it is named, not those that lost the connection."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from lightning_cp.launch import FailureKind, Job, LocalLauncher
from lightning_cp.launch.rendezvous import init_process_group
from lightning_cp.recipes.runs.command import reads_settings


@reads_settings
def leave_collectives(config: DictConfig) -> None:
    """All-reduce without end; rank 2 returns after a few times."""
    init_process_group("gloo")
    for _ in range(5 if dist.get_rank() == config.rank else 100_000):
        dist.all_reduce(torch.ones(1000))


@pytest.mark.full
def test_the_rank_that_left_the_collectives_is_named(tmp_path: Path) -> None:
    OmegaConf.save(OmegaConf.create({"rank": 2}), tmp_path / "config.yaml")
    job = Job(f"{__file__}:leave_collectives", tmp_path / "config.yaml", 3, tmp_path / "logs", threads=1)
    failure = LocalLauncher(limit_s=150).launch(job).failure
    assert failure is not None
    assert (failure.rank, failure.kind) == (2, FailureKind.EARLY), failure
    assert failure.message.startswith("rank 2 returned from the target while other ranks were still waiting for it")
