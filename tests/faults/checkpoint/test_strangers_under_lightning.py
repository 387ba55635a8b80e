"""Fabric and Trainer load checkpoints from untrusted authors without running their code."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_cp import fabric, pytorch
from lightning_cp.checkpoint import CheckpointError
from tests.dist.checkpoint.test_trainer_checkpoints import Trains
from tests.dist.lightning_ranks import fabric_of, flat, trainer_of
from tests.dist.module import Clips
from tests.faults.checkpoint import gadgets
from tests.harness import RankPool
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")


def _index(path: Path, ran: Path) -> None:
    index = path / ".metadata"
    index.write_bytes(gadgets.before(pickle.dumps(pickle.loads(index.read_bytes()), 2), gadgets.by_build(ran)))


def _index_of_a_rank(path: Path, ran: Path) -> None:
    """torch falls back to these when there is no other."""
    (path / ".metadata").unlink()
    for rank in range(2):
        (path / f"__{rank}.metadata").write_bytes(pickle.dumps(gadgets.Runs(ran)))


def _extra(path: Path, ran: Path) -> None:
    gadgets.add_to_archive(path / "meta.pt", gadgets.by_reduce(ran))


def _file(path: Path, ran: Path) -> None:
    gadgets.add_to_archive(path, gadgets.by_reduce(ran))


def _all_refused(
    rank: int, path: Path, load: Callable[[Path], object], changes: Sequence[Callable[[Path, Path], None]]
) -> list[str]:
    said, ran = [], path.parent / "ran"
    for change in changes:
        changed = path.with_name(f"{change.__name__}.ckpt")
        if rank == 0:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, changed)
            change(changed, ran)
        dist.barrier()
        with pytest.raises(CheckpointError) as caught:
            load(changed)
        said.append(str(caught.value))
        dist.barrier()
    assert not ran.exists()
    load(path)
    return said


def _with_trainer(rank: int, world: int, folder: str, sharded: bool) -> list[str]:
    kind: type[Any] = pytorch.ContextParallelFSDPStrategy if sharded else pytorch.ContextParallelStrategy
    trainer = trainer_of(rank, world, kind(ring=2), max_steps=1)
    data, path = DataLoader(Clips(2), batch_size=2), Path(folder) / "all.ckpt"
    trainer.fit(Trains(), data)
    trainer.save_checkpoint(path)
    changes: list[Callable[[Path, Path], None]] = [_index, _index_of_a_rank, _extra] if sharded else [_file]
    return _all_refused(rank, path, lambda changed: trainer.fit(Trains(), data, ckpt_path=changed), changes)


def _with_fabric(rank: int, world: int, folder: str, sharded: bool) -> list[str]:
    kind: type[Any] = fabric.ContextParallelFSDPStrategy if sharded else fabric.ContextParallelStrategy
    ours = fabric_of(rank, world, kind(ring=2))
    model = wan().build()
    state: dict[str, Any] = {"model": ours.setup(model), "step": 3}
    path = Path(folder) / "all.ckpt"
    ours.save(path, state)
    changes: list[Callable[[Path, Path], None]] = [_index, _index_of_a_rank, _extra] if sharded else [_file]
    said = _all_refused(rank, path, lambda changed: ours.load(changed, state), changes)
    before = flat(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ours.load(path, state)
    assert torch.equal(flat(model), before)
    return said


@pytest.mark.parametrize(("loads", "sharded"), [(_with_trainer, True), (_with_fabric, False)])
@pytest.mark.default(1)
def test_nothing_runs(run_ranks: RankPool, tmp_path: Path, loads: Callable[..., list[str]], sharded: bool) -> None:
    for said in run_ranks(2, loads, str(tmp_path), sharded, init=False):
        assert all("weights_only=False" in one or ".metadata cannot be read" in one for one in said), said
