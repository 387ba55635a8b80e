"""Find the number of queries and keys on each rank from the plan, for the attention calls of a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_cp.attention.key_cache import KeyCache
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.lengths import Sizes, are_whole, find_sizes
from lightning_cp.errors import PlanError, ShapeError
from lightning_cp.plans import LOCAL, Attention


@dataclass(eq=False)
class PlannedSizes:
    """Token counts of attention calls of a session, for all modules with the same `kinds`.

    `kinds=None`, for plans in diffusers' format: the kind of each call is derived from its token counts.
    """

    session: Session
    kinds: tuple[Attention, ...] | None

    def sizes(self, queries: int, keys: int, contents: Sequence[Tensor]) -> Sizes | None:
        """Derive the number of queries and keys on each rank from this rank's; None if the keys are whole.

        Empty lists: the numbers are unknown or ambiguous here; attention then exchanges the lengths between ranks.

        Args: queries, keys: number of tokens on this rank. contents: keys and values.
        Raises: PlanError: this rank's numbers fit no attention of the plan.
        """
        if self.kinds is None:
            return find_sizes(self.session, queries, keys)
        if self.kinds[0].ragged:
            return [], []
        call = self.session.current()
        rank, expected = call.groups.context_rank, []
        if self._has_local_among_others and are_whole(contents, keys, call.groups.context):
            return None
        for kind in self.kinds:
            sizes = self.sizes_of(kind, keys)
            if (queries, keys) == (sizes[0][rank], sizes[1][rank]):
                self._check_distinct(kind, sizes, keys)
                return None if kind.keys == LOCAL else sizes
            if kind.cached is True and queries == sizes[0][rank] and keys > sizes[1][rank]:
                return [], []  # every rank has kept keys of its own
            to = "each other" if kind.keys is None else " + ".join(kind.keys) or "whole keys"
            expected.append(f"{sizes[0][rank]} and {sizes[1][rank]} ({' + '.join(kind.queries)} to {to})")
        raise PlanError(
            f"attention got {queries} queries and {keys} keys, expected {', or '.join(expected)} on this rank: the "
            "plan does not fit this model"
        )

    @property
    def _has_local_among_others(self) -> bool:
        """True if calls with the same queries may have whole or sharded keys: token counts do not distinguish them."""
        kinds = self.kinds or ()
        split = {kind.queries for kind in kinds if kind.keys != LOCAL}
        return any(kind.queries in split for kind in kinds if kind.keys == LOCAL)

    def sizes_of(self, kind: Attention, keys: int) -> Sizes:
        call = self.session.current()
        if kind.keys == LOCAL:
            return call.sizes(kind.queries), [keys] * call.groups.context_size
        if (cache := self.cache_of(kind)) is not None:
            return call.sizes(kind.queries), cache.kv_lengths
        return call.sizes(kind.queries), call.sizes(kind.queries if kind.keys is None else kind.keys)

    def cache_of(self, kind: Attention) -> KeyCache | None:
        """Return the cache with the keys of this attention; None: it has no cache, or the block got none."""
        cache: KeyCache | None = self.session.current().kept.get(kind.cached) if isinstance(kind.cached, str) else None
        return cache

    def split_kind(self, sizes: Sizes) -> Attention | None:
        """Return the first kind of attention over split keys that has these sizes."""
        split = [kind for kind in self.kinds or () if kind.keys != LOCAL and not kind.ragged]
        return next((kind for kind in split if self.sizes_of(kind, 0) == sizes), None)

    def _check_distinct(self, chosen: Attention, sizes: Sizes, keys: int) -> None:
        """Check that token counts distinguish this call from other kinds of attention on every rank.

        Raises: ShapeError: on some rank they are equal, because it has too few tokens.
        """
        call, pairs = self.session.current(), list(zip(*sizes))
        for kind in self.kinds or ():
            modalities = (*kind.queries, *(kind.keys or ()))
            if kind == chosen or kind.keys == LOCAL or not all(call.lengths.get(modality) for modality in modalities):
                continue
            other = list(zip(*self.sizes_of(kind, keys)))
            if pairs != other and any(a == b for a, b in zip(pairs, other)):
                raise ShapeError(
                    f"attention of {' + '.join(chosen.queries)} and of {' + '.join(kind.queries)} have the same "
                    f"numbers of queries and keys on a rank ({pairs} and {other}, in rank order), "
                    "which distinguish them: use lower degrees, or more tokens"
                )
