"""What a run needs of Fabric or the Trainer: collectives and data of its ranks, loggers of pictures, peak memory."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from lightning.pytorch import Trainer  # seconds to import, and Fabric does not need it


T = TypeVar("T")


class Ranks(Protocol):
    """The part of `lightning.fabric.Fabric`'s interface that a run uses."""

    @property
    def device(self) -> torch.device:
        """Device of this rank."""

    @property
    def global_rank(self) -> int:
        """Global index of this rank."""

    @property
    def is_global_zero(self) -> bool:
        """True on global rank 0, which writes files and prints."""

    def all_reduce(self, data: Any, *, reduce_op: str) -> Any:
        """Reduce a tensor with `reduce_op` "sum" (over the data groups) or "mean" (over all ranks)."""

    def all_gather(self, data: Any) -> Any:
        """Gather a tensor from the data groups: [data groups, ...]; with a single device, the tensor as it is."""

    def broadcast(self, obj: T) -> T:
        """Return the first rank's object on every rank."""

    def barrier(self) -> None:
        """Wait for all ranks."""


@dataclass(frozen=True)
class TrainerRanks(Ranks):
    """The ranks of a Trainer during `fit`."""

    trainer: Trainer

    @property
    @override
    def device(self) -> torch.device:
        return self.trainer.strategy.root_device

    @property
    @override
    def global_rank(self) -> int:
        return self.trainer.global_rank

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.trainer.is_global_zero

    @override
    def all_reduce(self, data: Tensor, *, reduce_op: str) -> Tensor:
        reduced = self.trainer.strategy.reduce(data.clone(), reduce_op=reduce_op)
        assert isinstance(reduced, Tensor), "a tensor is reduced to a tensor"
        return reduced

    @override
    def all_gather(self, data: Tensor) -> Tensor:
        return self.trainer.strategy.all_gather(data)

    @override
    def broadcast(self, obj: T) -> T:
        return self.trainer.strategy.broadcast(obj)

    @override
    def barrier(self) -> None:
        self.trainer.strategy.barrier()


@dataclass(frozen=True)
class DataShard:
    """This rank's share of each global batch; all ranks of a context group have the same share.

    Args:
        rank: index of the share (data rank).
        size: number of shares.
    """

    rank: int
    size: int

    @classmethod
    def of(cls, strategy: object) -> DataShard:
        """Read the shard from a strategy; a strategy without data ranks gets all the data."""
        return cls(rank=int(getattr(strategy, "data_rank", 0)), size=int(getattr(strategy, "data_size", 1)))


def log_picture(logger: Any, name: str, picture: NDArray[np.uint8], step: int) -> None:
    """Log a picture with a TensorBoard or W&B logger; other loggers, such as CSVLogger, take none.

    Args:
        logger: logger of lightning.pytorch or lightning.fabric.
        picture: [height, width, channels].
    """
    if hasattr(logger, "log_image"):
        logger.log_image(name, [picture], step)
    elif hasattr(logger.experiment, "add_image"):
        logger.experiment.add_image(name, picture, step, dataformats="HWC")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far: on a GPU its allocated memory, on the CPU its resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
