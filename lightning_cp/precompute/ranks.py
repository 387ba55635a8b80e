"""Coordinate the ranks that encode a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_cp.mesh import MeshGroups

T = TypeVar("T")


@dataclass(frozen=True)
class EncodingRanks:
    """Ranks of a precompute run: groups of `vae_ranks` ranks encode one picture or clip together.

    Attributes:
        rank: this rank.
        size: number of ranks.
        data_rank: index of this rank's group.
        data_size: number of groups.
        groups: this rank's group; None if groups have one rank.
    """

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1
    groups: MeshGroups | None = None

    @classmethod
    def of_world(cls, vae_ranks: int = 1) -> EncodingRanks:
        """Return this rank's place in the world. Ranks: the whole world. Raises: ValueError: sizes do not divide."""
        if not dist.is_available() or not dist.is_initialized():
            if vae_ranks != 1:
                raise ValueError(f"vae_ranks={vae_ranks} needs as many ranks, but there is one")
            return cls()
        from lightning_cp.config import ContextParallelConfig
        from lightning_cp.pipelines import sampling_ranks

        rank, size = dist.get_rank(), dist.get_world_size()
        if vae_ranks == 1:
            return cls(rank, size, rank, size)
        ranks = sampling_ranks(ContextParallelConfig(ring_degree=vae_ranks))
        return cls(rank, size, ranks.data_rank, ranks.data_size, ranks.sample)

    @property
    def writes_media(self) -> bool:
        """True on the first rank of each group."""
        return self.groups is None or self.groups.context_rank == 0

    def on_first(self, function: Callable[[], T]) -> T:
        """Run a function on rank 0 and return its result on every rank; its exception is raised on every rank."""
        result: Any = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                result = function()
            except Exception as raised:
                error = raised
        if self.size > 1:
            message = [result, None if error is None else (type(error), str(error))]
            dist.broadcast_object_list(message, src=0)
            result, failure = message
            if failure is not None and error is None:
                kind, text = failure
                error = kind(text)
        if error is not None:
            raise error
        found: T = result
        return found

    def from_writer(self, value: T) -> T:
        """Return the value of the group's first rank. Ranks: the whole group."""
        if self.groups is None or self.groups.context is None:
            return value
        message = [value]
        dist.broadcast_object_list(message, group=self.groups.context, group_src=0)
        return message[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. Ranks: the whole world."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered


def rank_device(accelerator: str, local_rank: int) -> torch.device:
    """Return this rank's device. Args: accelerator: cpu or cuda."""
    return torch.device("cuda", local_rank) if accelerator == "cuda" else torch.device("cpu")
