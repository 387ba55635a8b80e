"""What is known during a forward: which streams are how long, and so which tokens are whose."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from lightning_cp.comm.shards import shard_sizes
from lightning_cp.config import ContextParallelConfig
from lightning_cp.errors import ShapeError
from lightning_cp.mesh import Groups
from lightning_cp.plans import Streams


@dataclass
class Call:
    """One forward of a parallel model. Its replays (activation checkpointing) see the same call.

    Attributes:
        lengths: global tokens of each stream met so far.
        whole: tokens of tensor arguments that are left whole (for plans that do not say what attends to what).
        intercepted: whether attention passed through the engine since this was last cleared.
        met: keys for which sizes were found out in this forward.
    """

    groups: Groups
    lengths: dict[str, int] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    intercepted: bool = False
    met: list[Hashable] = field(default_factory=list)

    def key(self) -> Hashable:
        """What is known of lengths so far, the same on all ranks."""
        return tuple(sorted(self.lengths.items())), tuple(sorted(self.whole))

    def shares(self, stream: str) -> tuple[int, ...]:
        """Tokens of each rank, of one stream."""
        return shard_sizes(self.lengths[stream], self.groups.context_size)

    def sizes(self, streams: Streams) -> list[int]:
        """Tokens of each rank, over `streams` together."""
        each = [self.shares(stream) for stream in streams]
        return [sum(sizes[rank] for sizes in each) for rank in range(self.groups.context_size)]

    def define(self, stream: str, length: int, *, main: str, name: str) -> None:
        """Learn a stream's length. Raises: ShapeError: the main stream has fewer tokens than the group has ranks."""
        size = self.groups.context_size
        if stream == main and length < size:
            raise ShapeError(
                f"{name} holds {length} {stream} tokens, fewer than the {size} ranks of the context group "
                f"(ring={self.groups.context_shape[0]} x ulysses={self.groups.context_shape[1]}): "
                "use lower degrees or a longer sequence"
            )
        self.lengths[stream] = length


@dataclass
class Session:
    """One model run context-parallel.

    Attributes:
        call: the forward under way; None outside.
        kernel: a name; "auto" follows diffusers' backend settings, which choose freely by default.
        backends: diffusers' registry of backends, where the model is one of diffusers'.
        check_peers: forwards whose arguments are still to be compared between peers (-1: all).
        forwards: how many forwards are under way (0 or 1; a model that calls itself: more).
        settled: by `Call.key`, whether each rank can tell all sizes from its own (for plans that do not say).
    """

    groups: Groups
    config: ContextParallelConfig
    main: str
    kernel: str = "auto"
    backends: Any = None
    check_peers: int = 0
    forwards: int = 0
    call: Call | None = None
    settled: dict[Hashable, bool] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> Session:
        return self  # a deep copy of a parallel model (an EMA's, say) belongs to the same session

    def current(self) -> Call:
        """The forward under way. Raises: RuntimeError outside of one."""
        if self.call is None:
            raise RuntimeError(
                "a context-parallel block ran outside of its model's forward, so its token counts are unknown: call "
                "the model as a whole. Activation checkpointing of blocks works with the model's own "
                "enable_gradient_checkpointing(), and with torch.utils.checkpoint(..., use_reentrant=False)"
            )
        return self.call
