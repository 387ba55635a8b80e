"""Resumed runs: bitwise equal at the same topology, equal to rounding at any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from lightning_cp.checkpoint import CheckpointError, latest_checkpoint, read_manifest
from lightning_cp.checkpoint.store import CheckpointWriter, flatten_state
from lightning_cp.data import GlobalBatchSampler
from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.recipes.training.run import check_same_checkpoint
from lightning_cp.recipes.training.state import TrainState
from lightning_cp.training import WeightAverage
from lightning_cp.training.ema import full_tensor
from lightning_cp.training.ranks import DataShard
from tests.dist.lightning_ranks import fabric_of
from tests.dist.module import Clips
from tests.harness import RankPool
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS: dict[str, Any] = {"cp": ContextParallelStrategy, "cp_fsdp": ContextParallelFSDPStrategy}
Snapshot = dict[str, Tensor]


def _start(rank: int, world: int, kind: str, settings: dict[str, Any], seed: int = 0) -> tuple[Fabric, TrainState]:
    strategy = "auto" if world == 1 else KINDS[kind](**settings)
    fabric = fabric_of(rank, world, strategy)
    data_shard = DataShard.of(fabric.strategy)
    sampler = GlobalBatchSampler(len(Clips(8)), 4, seed=seed, data_rank=data_shard.rank, data_size=data_shard.size)
    module = wan().build().float()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    return fabric, TrainState(model, module, optimizer, WeightAverage(module, 0.9), sampler, seed)


def _advance(fabric: Fabric, state: TrainState, *, until: int, augmented: bool) -> None:
    clips = Clips(8)
    while state.step < until:
        state.sampler.seek(state.step)
        items = [clips[i] for i in next(iter(state.sampler))]
        clip, text, times = (torch.stack([item[key] for item in items]) for key in ("clip", "text", "index"))
        if augmented:
            clip = clip + torch.randn_like(clip)
        out = state.model(clip, 100 + times, text, return_dict=False)[0]
        fabric.backward(out.square().mean())
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        state.average.update(state.module, step=state.step)


def _snapshot(state: TrainState) -> Snapshot:
    states = dict(state.snapshot().states)
    del states["random"]
    return {name: full_tensor(x).clone() for name, x in flatten_state(states)[0].items()}


def _save(rank: int, world: int, folder: Path, kind: str, settings: dict[str, Any], how: dict[str, Any]) -> Snapshot:
    """Save after step 2 and continue. Returns: the state at step 2, on the first rank."""
    fabric, state = _start(rank, world, kind, settings)
    with CheckpointWriter(folder, **how) as writer:
        _advance(fabric, state, until=2, augmented=False)
        then = _snapshot(state)
        writer.save(state.snapshot())
        _advance(fabric, state, until=3, augmented=False)
    return then


def _go_on(rank: int, world: int, folder: Path, kind: str, settings: dict[str, Any]) -> tuple[Snapshot, Snapshot, int]:
    fabric, state = _start(rank, world, kind, settings)
    newest = latest_checkpoint(folder.parent)
    assert newest is not None
    state.load(newest)
    then = _snapshot(state)
    _advance(fabric, state, until=3, augmented=False)
    return then, _snapshot(state), state.step


NOW: dict[str, bool] = {}
LATER = {"in_background": True}


@pytest.mark.parametrize(
    ("saved", "how", "resumed"),
    [
        ((4, "cp_fsdp", {"ring": 2}), LATER, [(1, "", {}), (2, "cp", {"ulysses": 2}), (3, "cp_fsdp", {"ring": 3})]),
        ((4, "cp_fsdp", {"ulysses": 2, "replicate": 2}), NOW, [(2, "cp_fsdp", {"ring": 2})]),
        ((2, "cp", {"ring": 2}), LATER, [(4, "cp_fsdp", {"ring": 2, "replicate": 2}), (3, "cp", {"ring": 3})]),
        ((1, "", {}), NOW, [(2, "cp_fsdp", {"ulysses": 2})]),
    ],
    ids=["sharded", "hybrid", "replicated", "one"],
)
@pytest.mark.default(1)
def test_a_checkpoint_is_read_at_any_other_degree_mode_and_sharding(
    run_ranks: RankPool, tmp_path: Path, saved: Any, how: dict[str, Any], resumed: Any
) -> None:
    folder = tmp_path / "checkpoints"
    world, kind, settings = saved
    then = run_ranks(world, _save, folder, kind, settings, how, init=False)[0]
    assert [path.name for path in folder.iterdir()] == ["step_00000002"]
    _, straight, _ = run_ranks(1, _go_on, folder, "", {}, init=False)[0]
    for world, kind, settings in resumed:
        loaded, after, step = run_ranks(world, _go_on, folder, kind, settings, init=False)[0]
        assert step == 3
        assert loaded.keys() == then.keys() == after.keys()
        assert all(torch.equal(loaded[name], then[name]) for name in then)
        moments, expected = (
            torch.cat([x.flatten() for name, x in s.items() if "exp_avg" in name]) for s in (after, straight)
        )
        assert (moments - expected).norm() < 1e-4 * expected.norm()


def _straight_and_resumed(rank: int, world: int, folder: Path, kind: str, how: dict[str, Any]) -> list[bool]:
    torch.manual_seed(rank // 2)  # context peers get equal ones
    fabric, state = _start(rank, world, kind, {"ring": 2})
    torch.manual_seed(7 + rank // 2)
    with CheckpointWriter(folder, **how) as writer:
        _advance(fabric, state, until=2, augmented=True)
        writer.save(state.snapshot())
        _advance(fabric, state, until=4, augmented=True)
    straight = _snapshot(state)
    dist.barrier()
    torch.manual_seed(1234)
    fabric, again = _start(rank, world, kind, {"ring": 2})
    again.load(folder / "step_00000002")
    _advance(fabric, again, until=4, augmented=True)
    resumed = _snapshot(again)
    return [torch.equal(straight[name], resumed[name]) for name in straight]


@pytest.mark.full
def test_at_the_same_topology_a_resumed_run_has_the_same_bits(run_ranks: RankPool, tmp_path: Path) -> None:
    same = run_ranks(4, _straight_and_resumed, tmp_path, "cp_fsdp", LATER, init=False)[0]
    assert same
    assert all(same)


def _other_model(rank: int, world: int, folder: Path) -> str:
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world))
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    sampler = GlobalBatchSampler(8, 4, seed=0)
    with pytest.raises(CheckpointError) as caught:
        TrainState(model, module, optimizer, WeightAverage(module, 0.9), sampler, 0).load(folder)
    return str(caught.value)


@pytest.mark.full
def test_another_models_shards_are_refused_on_every_rank(run_ranks: RankPool, tmp_path: Path) -> None:
    run_ranks(2, _save, tmp_path, "cp_fsdp", {"ring": 2}, NOW, init=False)
    folder = tmp_path / "step_00000002"
    for said in run_ranks(2, _other_model, folder, init=False):
        assert "belongs to another model or optimizer" in said
        assert "absent" in said
    shard = sorted(folder.glob("shard-*"))[-1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        read_manifest(folder)


def _failing_save(rank: int, world: int, folder: Path) -> str:
    fabric, state = _start(rank, world, "cp_fsdp", {"ring": 2})
    _advance(fabric, state, until=1, augmented=False)
    folder.joinpath("file").touch()
    writer = CheckpointWriter(folder / "file" / "below", in_background=True)
    writer.save(state.snapshot())
    with pytest.raises(OSError, match="Not a directory") as caught:
        writer.wait()
    return str(caught.value)


def test_a_failure_in_the_background_is_raised_by_the_next_call(run_ranks: RankPool, tmp_path: Path) -> None:
    assert all("Not a directory" in told for told in run_ranks(2, _failing_save, tmp_path, init=False))


def _resumes(rank: int, world: int) -> str:
    fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world))
    check_same_checkpoint(fabric, "a")
    with pytest.raises(CheckpointError) as raised:
        check_same_checkpoint(fabric, None if rank == world - 1 else "a")
    return str(raised.value)


def test_ranks_that_find_different_checkpoints_are_an_error_on_all(run_ranks: RankPool) -> None:
    errors = run_ranks(3, _resumes)
    assert all(f"rank 0 from a, rank {rank} from {None if rank == 2 else 'a'}" in x for rank, x in enumerate(errors))
    assert all("Set output_root to a folder that all nodes share" in error for error in errors)
