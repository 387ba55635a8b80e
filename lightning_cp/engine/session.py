"""What is known during a forward: which streams are how long, and so which tokens are whose."""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from lightning_cp.comm.shards import shard_sizes
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.peers import PeerCheck
from lightning_cp.engine.rules import Rules
from lightning_cp.errors import ShapeError
from lightning_cp.mesh import MeshGroups
from lightning_cp.plans import Streams


@dataclass
class Call:
    """One forward of a parallel model. Its replays (activation checkpointing) see the same call.

    Attributes:
        peers: compares this forward's arguments, once it is known that it splits any.
        lengths: global tokens of each stream met so far.
        rows: of the streams that are cut between rows only, how many they have.
        kept: arguments that the engine reads instead of a block.
        whole: tokens of tensor arguments that are left whole (for plans that do not say what attends to what).
        intercepted: whether attention passed through the engine since this was last cleared.
        met: keys for which sizes were found out in this forward.
        block: the last block (or other planned module) that was entered.
        unplanned: shapes of its tensor arguments that the plan does not mention, for errors.
    """

    groups: MeshGroups
    peers: PeerCheck
    lengths: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    intercepted: bool = False
    met: list[Hashable] = field(default_factory=list)
    block: str = ""
    unplanned: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def key(self) -> Hashable:
        """What is known of lengths so far, the same on all ranks."""
        return tuple(sorted(self.lengths.items())), tuple(sorted(self.whole))

    def shares(self, stream: str) -> tuple[int, ...]:
        """Tokens of each rank, of one stream; none where nothing told of it (references that were not given)."""
        rows, length = self.rows.get(stream), self.lengths.get(stream, 0)
        if not rows:
            return shard_sizes(length, self.groups.context_size)
        return tuple(n * (length // rows) for n in self.row_lengths(stream))

    def row_lengths(self, stream: str) -> tuple[int, ...]:
        """Rows of each rank, of a stream that is cut between rows."""
        return shard_sizes(self.rows[stream], self.groups.context_size)

    def sizes(self, streams: Streams) -> list[int]:
        """Tokens of each rank, over `streams` together."""
        each = [self.shares(stream) for stream in streams]
        return [sum(sizes[rank] for sizes in each) for rank in range(self.groups.context_size)]

    def define(self, stream: str, length: int, *, everywhere: bool, name: str) -> None:
        """Learn a stream's length, which begins to split this forward's tensors.

        Raises: ShapeError: a stream that each rank must have some of has fewer tokens than the group has ranks.
        """
        size, rows = self.groups.context_size, self.rows.get(stream)
        if rows is not None and length % rows:
            raise ShapeError(f"{name} holds {length} {stream} tokens, which are no {rows} rows of equal length")
        if everywhere and (length if rows is None else rows) < size:
            what = f"{length} {stream} tokens" if rows is None else f"{rows} rows (or frames) of {stream} tokens"
            raise ShapeError(
                f"{name} holds {what}, fewer than the {size} ranks of the context group "
                f"(ring={self.groups.context_shape[0]} x ulysses={self.groups.context_shape[1]}): "
                "use lower degrees or a longer sequence"
            )
        self.lengths[stream] = length
        if not torch.compiler.is_compiling():
            self.peers.start()


def _zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


@dataclass(eq=False)
class Session:
    """One model run context-parallel.

    Attributes:
        call: the forward under way; None outside.
        rules: its plan's.
        kernel: a name; "auto" follows diffusers' backend settings, which choose freely by default.
        backends: diffusers' registry of backends, where the model is one of diffusers'.
        peers: compares the arguments of forwards between peers.
        forwards: how many forwards are under way (0 or 1; a model that calls itself: more).
        succeeded: whether a forward has come to its end: the plan fits then, so a failure has other causes.
        number: of this session, for operators in compiled code.
        checked: forwards of compiled code whose arguments were checked.
        settled: by `Call.key`, whether each rank can tell all sizes from its own (for plans that do not say).
    """

    groups: MeshGroups
    config: ContextParallelConfig
    rules: Rules
    peers: PeerCheck
    kernel: str = "auto"
    backends: Any = None
    forwards: int = 0
    call: Call | None = None
    succeeded: bool = False
    number: int = field(default_factory=count().__next__)
    checked: torch.Tensor = field(default_factory=_zero)
    settled: dict[Hashable, bool] = field(default_factory=dict)

    def of_copy(self) -> Session:
        """A session for a deep copy of the model (an EMA's, say): the same groups and settings, and no forward yet."""
        peers = self.peers.of_copy()
        return Session(
            self.groups, self.config, self.rules, peers, self.kernel, self.backends, settled={**self.settled}
        )

    def __deepcopy__(self, memo: object) -> Session:
        return self  # of a part of a model: `Installed` makes a new one for the copy of a whole one

    def __reduce_ex__(self, protocol: object) -> Any:
        raise pickle.PicklingError(
            "a context-parallel model cannot be pickled: it holds process groups. Save its state_dict(), and call "
            "apply_context_parallel on the model it is loaded into; or call remove_context_parallel first"
        )

    def current(self) -> Call:
        """The forward under way. Raises: RuntimeError outside of one."""
        if self.call is None:
            raise RuntimeError(
                "a context-parallel block ran outside of its model's forward, so its token counts are unknown: call "
                "the model as a whole. Activation checkpointing of blocks works with the model's own "
                "enable_gradient_checkpointing(), and with torch.utils.checkpoint(..., use_reentrant=False)"
            )
        return self.call
