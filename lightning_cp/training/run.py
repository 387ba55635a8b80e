"""The folder of a run and the place of a rank in it."""

import logging
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning.fabric import Fabric


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


@dataclass(frozen=True)
class DataPlace:
    """Which share of each global batch is this rank's; all ranks of a context group have the same."""

    rank: int
    size: int


def start_fabric(fabric: Fabric, *, seed: int) -> None:
    """Joins the other ranks and seeds all of them alike, so that they build the same weights."""
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    fabric.launch()
    fabric.seed_everything(seed, verbose=False)


def open_run_folder(fabric: Fabric, path: str) -> RunFolder:
    """The first rank's folder, for all. Ranks that a launcher started may each have made one: theirs goes if empty."""
    chosen = Path(fabric.broadcast(path))
    if chosen.resolve() != Path(path).resolve():
        with suppress(OSError):
            Path(path).rmdir()
    folder = RunFolder(chosen)
    if fabric.is_global_zero:
        folder.samples.mkdir(parents=True, exist_ok=True)
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    return folder


def data_place(fabric: Fabric) -> DataPlace:
    """As the strategy says; a strategy of one process has all the data."""
    strategy = fabric.strategy
    return DataPlace(int(getattr(strategy, "data_rank", 0)), int(getattr(strategy, "data_size", 1)))
