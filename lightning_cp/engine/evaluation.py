"""The state that the engine needs of an evaluation in several forwards, one for each patch of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from lightning_cp.attention.call import Settings
from lightning_cp.plans import Attention, Modalities


class Evaluation(Protocol):
    """One evaluation of a model in patches, which keeps what a forward needs of other patches: `pipelines/pipefusion`.

    Attributes:
        patches: number of patches.
        patch: index of the current forward's patch; None: the forward computes the whole sequence.
    """

    patches: int
    patch: int | None

    def tokens(self, length: int) -> range:
        """Return the positions of the current patch in a sequence of `length` tokens."""

    def check_order(self, modalities: Modalities, name: str) -> None:
        """Raises: PlanError: the modalities of the argument `name` are not in the order of attention."""

    def put_output(self, x: Tensor, dim: int, segments: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return the output of the whole sequence, as far as it is known.

        Args: x: output of this patch on all ranks, with tokens in `dim`. segments: for each segment along `dim`, the
            number of tokens of the patch, before it and after it.
        """

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kind: Attention | None,
        *,
        sizes: tuple[list[int], list[int]],
        settings: Settings,
    ) -> Tensor:
        """Return the attention of this rank's queries over the keys of all patches. Ranks: all of the context group.

        Args: query, key, value: [b, s_local, h, d]. sizes: number of queries and of new keys on each rank.
        Raises: InterceptionError: this kind of attention cannot be computed in patches.
        """

    def sum_over_patches(
        self, modalities: Modalities, tensors: Sequence[Tensor], sums: Callable[..., Tensor]
    ) -> Tensor:
        """Return `sums(*tensors)`, summed over all ranks and patches. Ranks: all of the context group.

        Args: tensors: [b, s_local, ...], of tokens of `modalities`.
        """

    def extend_rows(
        self, x: Tensor, extended: Tensor, *, dim: int, reach: int, by_rank: Sequence[range], total: int
    ) -> Tensor:
        """Add the rows of other patches next to this patch. Ranks: all of the context group.

        Args: x: this rank's rows, in `dim`. extended: with a halo of `reach` rows of other ranks of the patch.
            by_rank: the rows of each rank in the whole sequence, which has `total` rows.
        """
