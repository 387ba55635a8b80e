"""State of a context-parallel model and of its current forward: modality lengths, and the shards that follow."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.shards import sizes_in
from lightning_cp.compat.compiler import allow_dynamic
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.evaluation import Evaluation
from lightning_cp.engine.model_plan import ModelPlan
from lightning_cp.engine.peers.comparison import PeerCheck
from lightning_cp.errors import ShapeError
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.plans import Modalities


@dataclass
class Call:
    """One forward of a parallel model. Recomputation (activation checkpointing) uses the same call.

    Attributes:
        peers: compares this forward's arguments between ranks; starts when the forward shards its first tensor.
        is_dynamic: compiled code may have lengths as symbols. (Attention derived from token counts compares them.)
        has_grad: gradients were enabled when the forward began.
        defined: global number of tokens of each modality seen so far; `lengths` gives it, also to compiled code.
        sized: for the same modalities, an empty tensor [tokens, 0].
        rows: global number of rows, for modalities that are split between rows only.
        kept: arguments that the engine keeps for its own use and does not pass to a block.
        unsplit_lengths: token counts of tensor arguments that are not split (for plans that do not describe attention).
        intercepted: True if the engine computed attention since the flag was last cleared.
        block: name of the last block (or other planned module) that was entered.
        shards: shards of tensors that several blocks get, such as positions: by `id` and spec, the tensor, its version,
            the shard, and the shard's version.
        unplanned: shapes of that block's tensor arguments that the plan does not mention, for errors.
        evaluation: the evaluation that this forward belongs to, if the model is computed in patches.
        shares_shards: shards are kept in `shards` in training, too.
        split_block: block that is called next, with arguments that are split already.
    """

    groups: MeshGroups
    peers: PeerCheck
    evaluation: Evaluation | None = None
    is_dynamic: bool = False
    has_grad: bool = False
    defined: dict[str, int] = field(default_factory=dict)
    sized: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    unsplit_lengths: set[int] = field(default_factory=set)
    intercepted: bool = False
    block: str = ""
    shards: dict[Hashable, tuple[weakref.ref[Tensor], int, Tensor, int]] = field(default_factory=dict, repr=False)
    unplanned: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shares_shards: bool = False
    split_block: object = None

    @property
    def lengths(self) -> dict[str, int]:
        """Global number of tokens of each modality seen so far.

        torch.compile makes constants of the ints that it reads from the engine's objects, but not of tensors' sizes.
        """
        if self.is_dynamic and torch.compiler.is_compiling():
            return {modality: x.shape[0] for modality, x in self.sized.items()}
        return self.defined

    @property
    def num_shards(self) -> int:
        """Number of shards of a sequence: one for each rank and patch."""
        return self.groups.context_size * (1 if self.evaluation is None else self.evaluation.patches)

    @property
    def is_split(self) -> bool:
        """True if this forward has only some of the tokens: other ranks or other patches have the rest."""
        return self.groups.context_size > 1 or (self.evaluation is not None and self.evaluation.patch is not None)

    def key(self) -> Hashable:
        """Return all lengths known so far as a hashable key, the same on all ranks."""
        return tuple(sorted(self.lengths.items())), tuple(sorted(self.unsplit_lengths))

    def sizes_of(self, modality: str) -> tuple[int, ...]:
        """Return each rank's number of tokens of one modality; zeros if its length is unknown (it was not passed)."""
        return self.division(modality)[1:-1]

    def division(self, modality: str) -> tuple[int, ...]:
        """Return how a modality's tokens are divided: those before the current patch, each rank's, those after it.

        Without patches there are no tokens before and after.
        """
        rows, length = self.rows.get(modality), self.lengths.get(modality, 0)
        return tuple(n * self.row_tokens(modality) for n in self._division(rows or length))

    def row_tokens(self, modality: str) -> int:
        """Return the number of tokens of a row; 1 for a modality that is split between tokens."""
        rows = self.rows.get(modality)
        return self.lengths.get(modality, 0) // rows if rows else 1

    def row_division(self, modality: str) -> tuple[int, ...]:
        """Return how the rows of a modality are divided, as `division`."""
        return self._division(self.rows[modality])

    def _division(self, length: int) -> tuple[int, ...]:
        if self.evaluation is None:
            return (0, *sizes_in(self.groups, length), 0)
        patch = self.evaluation.tokens(length)
        return (patch.start, *sizes_in(self.groups, len(patch)), length - patch.stop)

    def sizes(self, modalities: Modalities) -> list[int]:
        """Return each rank's number of tokens, summed over `modalities`."""
        if len(modalities) == 1:
            return list(self.sizes_of(modalities[0]))
        each = [self.sizes_of(modality) for modality in modalities]
        return [sum(sizes[rank] for sizes in each) for rank in range(self.groups.context_size)]

    def ranges(self, modalities: Modalities) -> list[tuple[range, ...]]:
        """Return, for each rank, the positions of its tokens in the concatenation of the whole modalities."""
        start = 0
        by_rank: list[list[range]] = [[] for _ in range(self.groups.context_size)]
        for modality in modalities:
            before, *sizes, _ = self.division(modality)
            first = start + before
            for rank, length in enumerate(sizes):
                by_rank[rank].append(range(first, first + length))
                first += length
            start += self.lengths.get(modality, 0)
        return [tuple(ranges) for ranges in by_rank]

    def define(self, modality: str, length: int, *, everywhere: bool, name: str) -> None:
        """Set the global length of a modality, and start to compare this forward's arguments between ranks.

        Args: everywhere: every rank must hold tokens of the modality. name: name of the argument, for errors.
        Raises: ShapeError: the length is not a multiple of the modality's rows, or `everywhere` is set and the group
            has more ranks than the modality has tokens (rows).
        """
        size, rows = self.num_shards, self.rows.get(modality)
        if rows is not None and length % rows:
            raise ShapeError(f"{name} holds {length} {modality} tokens, which do not divide into {rows} rows")
        if everywhere and (length if rows is None else rows) < size:
            what = f"{length} {modality} tokens" if rows is None else f"{rows} rows (or frames) of {modality} tokens"
            degrees = f"ring={self.groups.context_shape[0]} x ulysses={self.groups.context_shape[1]}"
            if self.evaluation is not None:
                raise ShapeError(
                    f"{name} holds {what}, fewer than patches={self.evaluation.patches} x {degrees}: use fewer "
                    "patches, lower degrees or a longer sequence (if a pipeline computes several resolutions, the "
                    "smallest one has the fewest tokens)"
                )
            raise ShapeError(
                f"{name} holds {what}, fewer than the {self.groups.context_size} ranks of the context group "
                f"({degrees}): use lower degrees or a longer sequence"
            )
        self.defined[modality], self.sized[modality] = length, torch.empty(length, 0, device="cpu")
        if not torch.compiler.is_compiling():
            allow_dynamic(self.sized[modality], 0)
            self.peers.start()


@dataclass(eq=False)
class Session:
    """Settings and state of one context-parallel model.

    Attributes:
        call: the current forward; None outside of a forward.
        evaluation: for a model that is computed in patches: the current evaluation.
        model_plan: the plan, fitted to the model.
        kernel: name of the attention kernel; "auto": that of diffusers' backend; if none is set, by device and dtype.
        backends: diffusers' registry of backends; None for other models.
        peers: compares the arguments of forwards between peers.
        forwards: number of forwards that are running: 0 or 1, or more if a model calls itself.
        succeeded: True after the first complete forward: the plan fits, so later failures have other causes.
        number: ID of the session in this process, for operators in compiled code.
        unchecked: values of `training` for which no forward was checked for missed attention calls since the plan was
            installed (see `MissedCalls`).
        num_graph_checks: number of compiled forwards that have checked their arguments (int64 scalar).
        derivable_sizes: `Call.key` with this rank's numbers of queries and keys, from which each rank can derive those
            of all ranks (for plans that do not describe attention).
        batch_groups: groups of all ranks that hold samples of the current batch, inside `pipelines.cfg_rows`; otherwise
            None.
    """

    groups: MeshGroups
    config: ContextParallelConfig
    model_plan: ModelPlan
    peers: PeerCheck
    kernel: str = "auto"
    backends: Any = None
    forwards: int = 0
    call: Call | None = None
    evaluation: Evaluation | None = None
    succeeded: bool = False
    number: int = field(default_factory=count().__next__)
    unchecked: set[bool] = field(default_factory=lambda: {False, True})
    num_graph_checks: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64, device="cpu"))
    derivable_sizes: set[Hashable] = field(default_factory=set)
    batch_groups: MeshGroups | None = None

    @property
    def batch_group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks that compute the current batch; None for a single rank."""
        return (self.batch_groups or self.groups).context

    def of_copy(self) -> Session:
        """Return a session for a deep copy of the model (for example EMA): same groups and settings, no forward yet."""
        peers = self.peers.of_copy()
        return Session(
            self.groups,
            self.config,
            self.model_plan,
            peers,
            self.kernel,
            self.backends,
            derivable_sizes={*self.derivable_sizes},
        )

    def begin(self, call: Call) -> Call | None:
        """Begin a forward. Returns: the call of the forward around it, for `end`."""
        outer = self.call if self.forwards else None  # an interrupted recomputation may have left one
        self.call, self.forwards = call, self.forwards + 1
        return outer

    def end(self, outer: Call | None) -> None:
        """End a forward. Args: outer: result of `begin`."""
        self.call, self.forwards = outer, self.forwards - 1

    @contextmanager
    def evaluating(self, evaluation: Evaluation | None) -> Iterator[None]:
        """Compute forwards of an evaluation in patches in this context."""
        before, self.evaluation = self.evaluation, evaluation
        try:
            yield
        finally:
            self.evaluation = before

    @contextmanager
    def sharing_batch(self, groups: MeshGroups) -> Iterator[None]:
        """Compute forwards in this context with samples of a batch that all ranks of `groups` share."""
        before, self.batch_groups = self.batch_groups, groups
        try:
            yield
        finally:
            self.batch_groups = before

    def use(self, config: ContextParallelConfig, groups: MeshGroups) -> None:
        """Compute the following forwards with other degrees, over the same ranks.

        Ranks: all of the context group. Raises: PeerMismatchError: see `PeerCheck.finish`.
        """
        if groups is not self.groups:
            self.peers.finish()
            self.config, self.groups, self.peers = config, groups, self.peers.of_groups(groups)
            self.derivable_sizes.clear()

    def __deepcopy__(self, memo: object) -> Session:
        return self  # for a copied part of a model; `Installed` creates a new session for a whole copy

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise pickle.PicklingError(
            "a context-parallel model cannot be pickled: it holds process groups. Save its state_dict(), and call "
            "apply_context_parallel on the model it is loaded into; or call remove_context_parallel first"
        )

    def current(self) -> Call:
        """Return the current forward. Raises: RuntimeError: no forward is running."""
        if self.call is None:
            raise RuntimeError(
                "a context-parallel block ran outside of its model's forward, so its token counts are unknown: call "
                "the model as a whole. Activation checkpointing of blocks works with the model's own "
                "enable_gradient_checkpointing(), and with torch.utils.checkpoint.checkpoint"
            )
        return self.call
