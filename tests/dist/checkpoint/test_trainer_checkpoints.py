"""Lightning's checkpoints: saved with one strategy and degree, resumed with another."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp.checkpoint import CheckpointError
from lightning_cp.pytorch import ContextParallelFSDPStrategy, ContextParallelStrategy
from tests.dist.lightning_ranks import QUIET, flat, present_rank, trainer_of
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")


class Trains(TrainsWan):
    """A module with an optimizer that has a state."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


STRATEGIES: dict[str, Any] = {
    "ring": lambda: ContextParallelStrategy(ring=2),
    "ulysses": lambda: ContextParallelStrategy(ulysses=2),
    "sharded": lambda: ContextParallelFSDPStrategy(ring=2),
    "sharded, whole file": lambda: ContextParallelFSDPStrategy(ulysses=2, save_distributed_checkpoint=False),
}


def _train(
    strategy: str, steps: int, *, world: int = 2, resume: Path | None = None, save: Path | None = None
) -> Tensor:
    module = Trains()
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=STRATEGIES[strategy](),
        max_steps=steps,
        use_distributed_sampler=False,
        **QUIET,  # type: ignore[arg-type]
    )
    clips = Clips(2)
    clips.sharded_by_data_rank = True  # type: ignore[attr-defined]  # several data groups may read the same here
    loader = DataLoader(clips, batch_size=2)
    trainer.fit(module, loader, ckpt_path=None if resume is None else str(resume))
    if save is not None:
        trainer.save_checkpoint(save)
    return flat(module)


def _go_on(rank: int, world: int, first: str, then: str, folder: str) -> float:
    present_rank(rank, world)
    straight = _train(first, 4)
    path = Path(folder) / "half.ckpt"
    half = _train(first, 2, save=path)
    resumed = _train(then, 4, resume=path)
    assert float((straight - half).norm()) > 1e-3
    return float((resumed - straight).norm() / (straight - half).norm())


@pytest.mark.parametrize(("first", "then"), [("ring", "sharded"), ("sharded, whole file", "sharded")])
@pytest.mark.default(1)
def test_a_fit_goes_on_under_another_strategy(run_ranks: RankPool, tmp_path: Path, first: str, then: str) -> None:
    assert max(run_ranks(2, _go_on, first, then, str(tmp_path), init=False)) < 1e-3


def _bits(rank: int, world: int, strategy: str, folder: str) -> bool:
    present_rank(rank, world)
    straight = _train(strategy, 4, world=world)
    path = Path(folder) / "half.ckpt"
    _train(strategy, 2, world=world, save=path)
    return torch.equal(_train(strategy, 4, world=world, resume=path), straight)


@pytest.mark.full
def test_a_fit_that_goes_on_at_the_same_topology_has_the_same_bits(run_ranks: RankPool, tmp_path: Path) -> None:
    assert all(run_ranks(4, _bits, "sharded", str(tmp_path), init=False))


def _later(rank: int, world: int, folder: str) -> tuple[list[str], float]:
    module = Trains()
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    strategy = ContextParallelStrategy(ring=2)
    settings = {"callbacks": [checkpoint], "enable_checkpointing": True, "plugins": [AsyncCheckpointIO()]}
    trainer = trainer_of(rank, world, strategy, max_steps=2, **settings)
    trainer.fit(module, DataLoader(Clips(2), batch_size=1))
    dist.barrier()  # the first rank has waited for its writer
    last = torch.load(checkpoint.best_model_path, weights_only=True)["state_dict"]
    error = max(float((last[name] - x).abs().max()) for name, x in module.state_dict().items())
    return sorted(path.name for path in Path(folder).iterdir()), error


def test_lightnings_asynchronous_checkpoints_work_as_ever(run_ranks: RankPool, tmp_path: Path) -> None:
    for files, error in run_ranks(2, _later, str(tmp_path), init=False):
        assert files == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]
        assert error == 0


def _cut_short(rank: int, world: int, folder: str, distributed: bool) -> int:
    """Writing the second checkpoint fails half-way, on the first rank, in its last step."""
    path, data = Path(folder) / "all.ckpt", DataLoader(Clips(2), batch_size=2)

    def trainer_until(steps: int) -> Trainer:
        strategy = ContextParallelFSDPStrategy(ring=2, save_distributed_checkpoint=distributed)
        return trainer_of(rank, world, strategy, max_steps=steps)

    save = torch.save

    def fails(content: Any, file: Any, *_: Any) -> None:
        if not isinstance(file, str | Path):
            return save(content, file)  # DCP's values
        raise OSError("disk full")

    trainer = trainer_until(1)
    trainer.fit(Trains(), data)
    trainer.save_checkpoint(path)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(trainer.lightning_module, data)
    written = (
        "lightning.pytorch.strategies.model_parallel.torch.save"
        if distributed
        else "lightning.fabric.plugins.io.torch_io._atomic_save"
    )
    with mock.patch(written, fails), mock.patch.object(ContextParallelFSDPStrategy, "barrier"), suppress(OSError):
        trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(False), path)
    assert rank > 0 or not Path(folder, "all.ckpt.partial").exists()
    dist.barrier()
    again = trainer_until(3)
    again.fit(Trains(), data, ckpt_path=path)
    if not distributed:
        with pytest.raises(IsADirectoryError):
            again.save_checkpoint(Path(folder) / "own")
    return len(again.lightning_module.seen)  # from step 1 on


def _sharded(rank: int, world: int, folder: str) -> str:
    trainer = trainer_of(rank, world, ContextParallelFSDPStrategy(ring=2), max_steps=1)
    trainer.fit(Trains(), DataLoader(Clips(2), batch_size=2))
    path = Path(folder) / "all.ckpt"
    trainer.save_checkpoint(path)
    with pytest.raises(CheckpointError) as caught:
        trainer_of(rank, world, ContextParallelStrategy(ring=2)).fit(Trains(), DataLoader(Clips(2)), ckpt_path=path)
    return str(caught.value)


@pytest.mark.parametrize("distributed", [True, False])
def test_a_save_that_is_cut_short_leaves_the_older_one(run_ranks: RankPool, tmp_path: Path, distributed: bool) -> None:
    own = [tmp_path / "own" / name for name in ("meta.pt", "notes.txt")]  # a user's: no checkpoint takes its place
    own[0].parent.mkdir()
    for path in own:
        path.touch()
    assert run_ranks(2, _cut_short, str(tmp_path), distributed, init=False) == [2, 2]
    assert all(path.exists() for path in own)


def test_whole_weights_are_not_loaded_from_shards(run_ranks: RankPool, tmp_path: Path) -> None:
    for said in run_ranks(2, _sharded, str(tmp_path), init=False):
        assert "save_distributed_checkpoint=False" in said


class _FromConfig(Trains):
    """With a transformer that is made from its configuration alone."""

    def __init__(self, config: Any) -> None:
        LightningModule.__init__(self)
        self.transformer, self.seen = WanTransformer3DModel.from_config(config), []


def _made_empty(rank: int, world: int, folder: str) -> tuple[bool, bool]:
    data, path, config = DataLoader(Clips(2), batch_size=2), Path(folder) / "all.ckpt", wan().build().config
    found = []
    for steps, empty in ((1, False), (2, False), (2, True)):
        trainer = trainer_of(rank, world, ContextParallelFSDPStrategy(ring=2), max_steps=steps)
        with trainer.init_module(empty_init=empty):
            module = _FromConfig(config)
        nowhere = all(p.is_meta for p in module.parameters())
        trainer.fit(module, data, ckpt_path=path if steps == 2 else None)
        if steps == 1:
            trainer.save_checkpoint(path)
        found.append(flat(module))
    return nowhere, torch.equal(found[1], found[2])


@pytest.mark.full
def test_a_module_made_without_storage_goes_on_from_a_checkpoint(run_ranks: RankPool, tmp_path: Path) -> None:
    assert run_ranks(2, _made_empty, str(tmp_path), init=False) == [(True, True)] * 2
