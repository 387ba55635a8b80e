"""A disk that fills up while a checkpoint is written: one OSError, the older checkpoint, and nothing else stays."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_cp.checkpoint import latest_checkpoint
from lightning_cp.checkpoint.shards import save_shards
from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint
from tests.harness import warm

SAVES = {"full": save_checkpoint, "distributed": save_shards}


def checkpoint(step: int, rows: int) -> Checkpoint:
    return Checkpoint(step, {"model": {"weight": torch.ones(rows, 1024)}, "average": {"weight": torch.ones(8)}}, {})


def saves_until_full(parent: Path, format: str) -> None:
    """Saves a small checkpoint, and then one that does not fit."""
    warnings.simplefilter("ignore")
    kept = SAVES[format](parent, checkpoint(1, 8))
    with pytest.raises(OSError, match=r"written|too large|No space"):
        SAVES[format](parent, checkpoint(2, 4096))
    assert [path.name for path in parent.iterdir()] == [kept.name]
    assert latest_checkpoint(parent.parent) == kept
    SAVES[format](parent, checkpoint(3, 8), keep=1)
    assert [path.name for path in parent.iterdir()] == ["step_00000003"]


_LIMITED = (
    "import resource, sys; from pathlib import Path; from tests.faults.test_full_disk import saves_until_full\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); saves_until_full(Path(sys.argv[1]), sys.argv[2])"
)


@pytest.mark.parametrize("format", SAVES)
def test_a_file_that_cannot_grow(tmp_path: Path, format: str) -> None:
    command = [sys.executable, "-c", _LIMITED, str(tmp_path / "checkpoints"), format]
    ended = warm.run(command, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no disk may be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.full
@pytest.mark.parametrize("format", SAVES)
def test_a_full_disk(small_disk: Path, format: str) -> None:
    saves_until_full(small_disk / "checkpoints", format)
