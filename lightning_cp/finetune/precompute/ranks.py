"""Coordinate the ranks that encode a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_cp.comm.agree import gather_objects
from lightning_cp.finetune.precompute.run_state import RunState, StoppedElsewhere
from lightning_cp.mesh.groups import MeshGroups

T = TypeVar("T")
Report = Callable[[int], object]  # called with the number of items that are done


def _ignore(_: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class EncodingRanks:
    """Ranks of a precompute run: groups of `vae_ranks` ranks encode one picture or clip together.

    Attributes:
        rank: this rank.
        size: number of ranks.
        data_rank: index of this rank's group.
        data_size: number of groups.
        groups: this rank's group; None if groups have one rank.
        state: progress and errors of all ranks; None if there is one rank.
    """

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1
    groups: MeshGroups | None = None
    state: RunState | None = None

    @classmethod
    def of_world(cls, vae_ranks: int = 1) -> EncodingRanks:
        """Divide the world into groups of `vae_ranks` ranks. Ranks: the whole world.

        Raises: ValueError: `vae_ranks` does not divide the number of ranks.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            if vae_ranks != 1:
                raise ValueError(f"vae_ranks={vae_ranks} needs as many ranks, but there is one")
            return cls()
        from lightning_cp.config import ContextParallelConfig
        from lightning_cp.pipelines import sampling_ranks

        rank, size = dist.get_rank(), dist.get_world_size()
        if vae_ranks < 1 or size % vae_ranks:
            raise ValueError(f"vae_ranks={vae_ranks} must divide the number of ranks, {size}")
        state = RunState()
        if vae_ranks == 1:
            return cls(rank, size, rank, size, state=state)
        ranks = sampling_ranks(ContextParallelConfig(ring_degree=vae_ranks))
        return cls(rank, size, ranks.data_rank, ranks.data_size, ranks.sample, state)

    @property
    def writes_media(self) -> bool:
        """True on the first rank of each group."""
        return self.groups is None or self.groups.context_rank == 0

    @contextmanager
    def phase(self, on_count: Report = _ignore) -> Iterator[Report]:
        """Run one phase on all ranks. An exception on one rank ends the phase, and is raised on every rank.

        Args: on_count: called with the number of items that all ranks have done.
        Yields: function to call with the number of items that this rank has done.
        Ranks: the whole world.
        """
        done = 0

        def report(number: int) -> None:
            nonlocal done
            done += number
            on_count(done if self.state is None else self.state.count(number))

        if self.state is None:
            yield report
            return
        self.state.begin()
        ours: Exception | None = None
        try:
            yield report
        except StoppedElsewhere:
            pass
        except Exception as error:
            ours = error
            self.state.fail(error)
        first = self.state.end(on_count)
        if first is None:
            return
        if ours is not None and (first.rank == self.rank or str(ours) == first.text):
            raise ours  # with its own traceback
        raise first.exception()

    def check(self) -> None:
        """End this rank's phase early if another rank has failed. Call it between two samples."""
        if self.state is not None:
            self.state.check()

    def on_first(self, function: Callable[[], T]) -> T:
        """Run a function on rank 0 and return its result on every rank; its exception is raised on every rank."""
        result: Any = None
        with self.phase():
            if self.rank == 0:
                result = function()
        if self.size > 1:
            message = [result]
            dist.broadcast_object_list(message, src=0)
            (result,) = message
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
        return gather_objects(value, None if self.size == 1 else dist.group.WORLD)


def rank_device(accelerator: str, local_rank: int) -> torch.device:
    """Return this rank's device. Args: accelerator: cpu or cuda."""
    return torch.device("cuda", local_rank) if accelerator == "cuda" else torch.device("cpu")
