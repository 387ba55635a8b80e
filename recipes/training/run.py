"""Hold the parts of a run on this rank: collectives, training state, run folder, data shard, stop request."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core import rank_zero
from torch import Tensor

from lightning_cp.checkpoint import CheckpointError
from lightning_cp.comm.background import numbers_on
from lightning_cp.errors import DataError
from lightning_cp.finetune.module import FineTuning
from lightning_cp.launch.channel import STOP_SIGNALS, Stopped, StopRequest
from lightning_cp.recipes.training.state import TrainState
from lightning_cp.training.ranks import DataShard, Ranks


@dataclass(frozen=True)
class Run:
    """The parts of a run on this rank.

    Args:
        tuning: the module with the run's loss, validation and export.
        folder: the output folder of the run, the same on all ranks.
        logger: Lightning's logger of the settings, on global rank 0; None: none.
    """

    ranks: Ranks
    state: TrainState
    tuning: FineTuning
    folder: Path
    data_shard: DataShard
    request: StopRequest
    logger: Any = None

    @property
    def is_first(self) -> bool:
        """True on global rank 0, which writes files and prints."""
        return self.ranks.is_global_zero

    def means_and_request(self, *values: Tensor) -> tuple[list[float], int]:
        """Average scalars over all ranks, with one all-reduce and one host read. Call it on every rank.

        Returns: the means, and the number of a stop signal received by any rank (0: none).
        """
        device = self.ranks.device
        requests = numbers_on(device, [self.request.number == number for number in STOP_SIGNALS], torch.float64)
        both = torch.cat([*(x.detach().to(device).double().view(1) for x in values), requests])
        averages = self.ranks.all_reduce(both, reduce_op="mean").tolist()
        means, shares = averages[: len(values)], averages[len(values) :]
        return means, next((number for number, share in zip(STOP_SIGNALS, shares, strict=True) if share), 0)

    def raise_if_stop_requested(self) -> None:
        """Check for stop requests during long work. Call it on every rank. Raises: Stopped: a rank has a request."""
        _, number = self.means_and_request()
        if number:
            raise self.stopped(number)

    def stopped(self, number: int) -> Stopped:
        """Create the error that ends the run after a stop signal; raise it after saving the checkpoint, if any."""
        name, step = signal.Signals(number).name, self.state.step
        outcome = "with a checkpoint: continue with resume=last"
        if not self.state.is_finite:
            outcome = "without a checkpoint: weights are not finite"
        return Stopped(f"stopped by {name} after step {step}, {outcome}", number)


def open_run_folder(ranks: Ranks, path: str) -> Path:
    """Use the first rank's folder on all ranks, and create its subfolders.

    Under a launcher each rank may have created a folder with another name; it is removed if empty.
    """
    folder = Path(ranks.broadcast(path))
    if folder.resolve() != Path(path).resolve():
        with suppress(OSError):
            Path(path).rmdir()
    if ranks.is_global_zero:
        for name in ("samples", "checkpoints"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def check_same_checkpoint(ranks: Ranks, resume: str | None) -> None:
    """Check that all ranks resume from the same checkpoint: under a launcher, each has searched for it.

    Args: resume: path of the checkpoint; None: this rank starts anew.
    Ranks: the whole world. Raises: CheckpointError: they differ, on all ranks.
    """
    first = ranks.broadcast(resume)
    if float(ranks.all_reduce(torch.tensor(float(resume != first), device=ranks.device), reduce_op="mean")):
        raise CheckpointError(
            f"the ranks do not resume from the same checkpoint: rank 0 from {first}, rank {ranks.global_rank} from "
            f"{resume} (None: it starts anew). Set output_root to a folder that all nodes share, or set resume to the "
            "folder of one checkpoint"
        )


def check_is_done(run: Run, max_steps: int) -> None:
    """Check that training reached its last step. Raises: DataError: the data ended before it."""
    if run.state.step < max_steps:
        raise DataError(f"the data ended after step {run.state.step}, before max_steps={max_steps}")


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hide Lightning's start and end messages; its warnings and the strategy's log lines are still shown."""
    loggers = (rank_zero.log, logging.getLogger("lightning.fabric.utilities.distributed"))
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
