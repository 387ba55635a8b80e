"""A run on this rank: the other ranks, what is trained, the folder, the place in the data."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning_utilities.core import rank_zero
from torch import Tensor

from lightning_cp.app.training.state import TrainState
from lightning_cp.errors import DataError
from lightning_cp.launch.stopping import ASKING, Stopped, StopRequest
from lightning_cp.training.ranks import DataShard, Ranks


@dataclass(frozen=True)
class RunFolder:
    """Where a run leaves what it makes; the same folder on all ranks."""

    path: Path

    @property
    def metrics(self) -> Path:
        """A row a step."""
        return self.path / "metrics.csv"

    @property
    def loss_curve(self) -> Path:
        """Drawn from the metrics."""
        return self.path / "loss.png"

    @property
    def checkpoints(self) -> Path:
        """Holds `step_<n>`."""
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        """Holds pictures of samples."""
        return self.path / "samples"

    def trace(self, rank: int) -> Path:
        """Of one step of one rank, where one is recorded."""
        return self.path / "trace" / f"rank_{rank}.json"


@dataclass(frozen=True)
class Run:
    """The parts of a run on this rank."""

    ranks: Ranks
    state: TrainState
    folder: RunFolder
    data_shard: DataShard
    request: StopRequest

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and speaks."""
        return self.ranks.is_global_zero

    def means_and_request(self, *values: Tensor) -> tuple[list[float], int]:
        """Average scalars over all ranks, with one collective and one read on the host. Call it on every rank.

        Returns: the means, and the signal that asks any rank to stop (0: none).
        """
        asked = torch.tensor([float(self.request.number == number) for number in ASKING], dtype=torch.float64)
        device = self.ranks.device
        both = torch.cat([*(x.detach().to(device).double().view(1) for x in values), asked.to(device)])
        found = self.ranks.all_reduce(both, reduce_op="mean").tolist()
        means, asking = found[: len(values)], found[len(values) :]
        return means, next((number for number, share in zip(ASKING, asking, strict=True) if share), 0)

    def raise_if_stop_requested(self) -> None:
        """Between parts of long work. Call it on every rank. Raises: Stopped: some rank was asked to stop."""
        _, number = self.means_and_request()
        if number:
            raise self.stopped(number)

    def stopped(self, number: int) -> Stopped:
        """The error that ends the run because of a signal, once a checkpoint is written where one can be."""
        name, step = signal.Signals(number).name, self.state.step
        saved = "with a checkpoint: go on with resume=last"
        if not self.state.is_finite:
            saved = "without a checkpoint: weights are not finite"
        return Stopped(f"stopped by {name} after step {step}, {saved}", number)


def open_run_folder(ranks: Ranks, path: str) -> RunFolder:
    """The first rank's folder, for all. Ranks that a launcher started may each have made one: theirs goes if empty."""
    chosen = Path(ranks.broadcast(path))
    if chosen.resolve() != Path(path).resolve():
        with suppress(OSError):
            Path(path).rmdir()
    folder = RunFolder(chosen)
    if ranks.is_global_zero:
        folder.samples.mkdir(parents=True, exist_ok=True)
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    return folder


def check_is_done(run: Run, max_steps: int) -> None:
    """Raises: DataError: the loop over the data has ended before the last step."""
    if run.state.step < max_steps:
        raise DataError(f"the data ended after step {run.state.step} of max_steps={max_steps}")


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without what Lightning tells at every start and end; its warnings, and what the strategy says, come through."""
    loggers = (rank_zero.log, logging.getLogger("lightning.fabric.utilities.distributed"))
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
