"""The ranks of a run as its parts need them: Fabric as it is, or those of a Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from lightning.pytorch import Trainer  # seconds to import, and Fabric does not need it


class Ranks(Protocol):
    """What `lightning.fabric.Fabric` offers, of which a run uses this."""

    @property
    def device(self) -> torch.device:
        """This rank's."""
        ...

    @property
    def global_rank(self) -> int:
        """This one's, of all."""
        ...

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes and speaks."""
        ...

    def all_reduce(self, data: Any, *, reduce_op: str) -> Any:
        """The sum or mean of a tensor over all ranks."""
        ...

    def broadcast(self, obj: Any) -> Any:
        """The first rank's object."""
        ...

    def barrier(self) -> None:
        """Waits for all ranks."""
        ...


@dataclass(frozen=True)
class TrainerRanks(Ranks):
    """The ranks of a Trainer that is fitting."""

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
    def broadcast(self, obj: Any) -> Any:
        return self.trainer.strategy.broadcast(obj)

    @override
    def barrier(self) -> None:
        self.trainer.strategy.barrier()


@dataclass(frozen=True)
class DataShard:
    """Which share of each global batch is this rank's; all ranks of a context group have the same.

    Args:
        rank: index of the share.
        size: number of shares.
        is_first: of its context group; one rank a share is.
    """

    rank: int
    size: int
    is_first: bool = True

    @classmethod
    def of(cls, strategy: object) -> DataShard:
        """As the strategy says; a strategy of one process has all the data."""
        return cls(
            rank=int(getattr(strategy, "data_rank", 0)),
            size=int(getattr(strategy, "data_size", 1)),
            is_first=int(getattr(strategy, "context_rank", 0)) == 0,
        )
