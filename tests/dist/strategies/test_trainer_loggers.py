"""Loggers and progress bars under the Trainer, at ring 2 x data 2: written once, with the losses of one process."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest
import rich
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_cp.pytorch import ContextParallelStrategy
from tests.dist.lightning_ranks import everyones, trainer_of
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4  # an epoch at two data ranks; it would be 2 if each rank took samples of its own
ROUNDED = 6e-4  # of the three digits that a bar shows


class _ShowsLoss(TrainsWan):
    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.log("shown", loss, prog_bar=True, sync_dist=True)
        return loss


def _fit(rank: int, world: int, **settings: Any) -> list[float]:
    """One epoch. Returns: the loss of each step, in one process on the global batches."""
    module, data = _ShowsLoss(), Clips(16)
    trainer = trainer_of(rank, world, ContextParallelStrategy(ring=2), max_epochs=1, log_every_n_steps=1, **settings)
    trainer.fit(module, DataLoader(data, batch_size=2))
    reference, losses = TrainsWan(), []
    optimizer = torch.optim.SGD(reference.parameters(), lr=reference.lr)
    first, second = everyones(module.seen)[::2]
    for one, other in zip(first, second, strict=True):
        batch = next(iter(DataLoader([data[index] for index in one + other], batch_size=4)))  # type: ignore[arg-type]
        loss = reference.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def _files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def _to_tensorboard(rank: int, world: int, folder: str) -> list[float]:
    logger = TensorBoardLogger(f"{folder}/rank {rank}", name="board")
    return _fit(rank, world, logger=logger, enable_checkpointing=True)


def test_tensorboard_gets_one_event_file(run_ranks: RankPool, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    losses = run_ranks(4, _to_tensorboard, str(tmp_path), init=False)[0]
    files, version = _files(tmp_path), Path("rank 0", "board", "version_0")
    assert {path.parts[0] for path in files} == {"rank 0"}
    checkpoint, events, settings = files
    assert checkpoint == version / "checkpoints" / f"epoch=0-step={STEPS}.ckpt"
    assert settings == version / "hparams.yaml"
    assert events.parent == version
    board = EventAccumulator(str(tmp_path / events)).Reload()
    logged = board.Scalars("train_loss")
    assert [scalar.step for scalar in logged] == list(range(STEPS))
    assert [scalar.value for scalar in logged] == pytest.approx(losses, rel=1e-4)


def _history(path: Path) -> list[dict[str, Any]]:
    """The rows of an offline run: records as in LevelDB's log, in blocks, each record in one part or several."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    block, header, last_parts = 2**15, 7, (1, 4)
    data, at, record, rows = path.read_bytes(), header, b"", []
    while at < len(data):
        left = block - at % block
        if left < header:
            at += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        record += data[at + header : at + header + length]
        at += header + length
        if part in last_parts:
            items = Record.FromString(record).history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
            record = b""
    return [row for row in rows if row]


def _to_wandb(rank: int, world: int, folder: str) -> tuple[list[float], list[str]]:
    """Losses, and the processes that are left."""
    own = Path(folder, f"rank {rank}")
    own.mkdir()
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_ERROR_REPORTING="false", WANDB_DIR=str(own))
    os.environ.update({f"WANDB_{name}_DIR": str(own / name) for name in ("CACHE", "CONFIG", "DATA")})
    try:
        losses = _fit(rank, world, logger=WandbLogger(save_dir=own, offline=True))
    finally:
        if "wandb" in sys.modules:  # the pool keeps this process, so nothing would end wandb's
            sys.modules["wandb"].teardown()
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=60)
    return losses, [" ".join(process.cmdline()) for process in left]


@pytest.mark.full  # it starts a service of its own, which takes its time on a busy machine
def test_wandb_gets_one_offline_run(run_ranks: RankPool, tmp_path: Path) -> None:
    (losses, left), *others = run_ranks(4, _to_wandb, str(tmp_path), init=False)
    assert not left
    assert not any(left for _, left in others)
    assert {path.parts[0] for path in _files(tmp_path)} == {"rank 0"}
    (run,) = tmp_path.rglob("offline-run-*")
    (records,) = run.glob("*.wandb")
    rows = _history(records)
    assert [row["trainer/global_step"] for row in rows] == list(range(STEPS))
    assert [row["train_loss"] for row in rows] == pytest.approx(losses, rel=1e-4)


def _drawn(rank: int, world: int, kind: str) -> tuple[list[float], str]:
    """Losses, and what was written to stdout and stderr."""
    tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which stays when a worker of the pool is killed
    bar = RichProgressBar(console_kwargs={"width": 200}) if kind == "rich" else TQDMProgressBar()
    written = io.StringIO()
    with redirect_stdout(written), redirect_stderr(written):
        losses = _fit(rank, world, callbacks=[bar], enable_progress_bar=True)
    rich.reconfigure()  # the console is the process's
    return losses, written.getvalue()


@pytest.mark.parametrize(("kind", "label"), [("tqdm", "shown="), ("rich", "shown: ")])
@pytest.mark.default(1)
def test_only_the_first_rank_draws_a_progress_bar(run_ranks: RankPool, kind: str, label: str) -> None:
    (losses, drawn), *others = run_ranks(4, _drawn, kind, init=False)
    assert [written for _, written in others] == [""] * 3
    shown = [line for line in drawn.splitlines() if label in line]
    assert shown, drawn
    assert f" {STEPS}/{STEPS} " in shown[-1]
    loss = float(shown[-1].split(label)[1][:5])
    assert loss == pytest.approx(losses[-1], abs=ROUNDED)
