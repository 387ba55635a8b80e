"""Loggers and callbacks under the Trainer, at ring 2 x data 2: once, with one process's losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_cp.pytorch import ContextParallelStrategy
from tests.dist.lightning_ranks import trainer_of
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4  # an epoch at two data ranks; it would be 2 if each rank took samples of its own


def _fit(rank: int, world: int, **settings: Any) -> list[list[int]]:
    """One epoch. Returns: the samples of each step."""
    module = TrainsWan()
    trainer = trainer_of(rank, world, ContextParallelStrategy(ring=2), max_epochs=1, log_every_n_steps=1, **settings)
    trainer.fit(module, DataLoader(Clips(16), batch_size=2))
    return module.seen


def _losses(first: list[list[int]], second: list[list[int]]) -> list[float]:
    """The loss of each step, in one process on the batches of both data groups."""
    reference, data, losses = TrainsWan(), Clips(16), []
    optimizer = reference.configure_optimizers()
    for one, other in zip(first, second, strict=True):
        batch = next(iter(DataLoader([data[index] for index in one + other], batch_size=4)))  # type: ignore[arg-type]
        losses.append(reference.loss(batch))
        losses[-1].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses]


def _files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def _to_tensorboard(rank: int, world: int, folder: str) -> list[list[int]]:
    logger = TensorBoardLogger(f"{folder}/rank {rank}", name="board")
    return _fit(rank, world, logger=logger, enable_checkpointing=True)


def test_tensorboard_gets_one_event_file(run_ranks: RankPool, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    seen = run_ranks(4, _to_tensorboard, str(tmp_path), init=False)
    version = Path("rank 0", "board", "version_0")
    checkpoint, events, settings = _files(tmp_path)
    assert checkpoint == version / "checkpoints" / f"epoch=0-step={STEPS}.ckpt"
    assert settings == version / "hparams.yaml"
    assert events.parent == version
    logged = EventAccumulator(str(tmp_path / events)).Reload().Scalars("train_loss")
    assert [scalar.step for scalar in logged] == list(range(STEPS))
    assert [scalar.value for scalar in logged] == pytest.approx(_losses(*seen[::2]), rel=1e-4)


def _callbacks(rank: int, world: int, folder: str) -> dict[str, Any]:
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True)
    stopping = EarlyStopping("val_loss", mode="max", patience=1)  # the loss falls, so it stops after two epochs
    given: dict[str, Any] = {"max_epochs": 5, "enable_checkpointing": True, "logger": CSVLogger(folder, version=0)}
    given |= {"profiler": "simple", "callbacks": [checkpoint, EMAWeightAveraging(decay=0.5), stopping]}
    trainer = trainer_of(rank, world, ContextParallelStrategy(ring=2), log_every_n_steps=1, **given)
    loader = DataLoader(Clips(8), batch_size=2)
    trainer.fit(TrainsWan(), loader, loader)
    again = TrainsWan()
    again.load_state_dict(torch.load(checkpoint.best_model_path, weights_only=True)["state_dict"])
    loss = trainer.validate(again, loader, verbose=False)[0]["val_loss"]
    dist.barrier()  # the first rank has written all
    return {
        "epochs": trainer.current_epoch,
        "best": checkpoint.best_model_path,
        "loss": pytest.approx(loss, rel=1e-4) == float(checkpoint.best_model_score),  # type: ignore[arg-type]
        "files": len(list(Path(folder).glob("*.ckpt"))),
        "rows": len((Path(folder) / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()),
    }


@pytest.mark.full
def test_callbacks_and_loggers_work_as_ever(run_ranks: RankPool, tmp_path: Path) -> None:
    results = run_ranks(4, _callbacks, str(tmp_path), init=False)
    assert results == [results[0]] * 4
    assert results[0]["rows"] > 4
    assert [results[0][name] for name in ("epochs", "loss", "files")] == [2, True, 2]
