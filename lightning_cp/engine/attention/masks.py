"""Masks of a model over tokens that the ranks share: block masks with their attention, and masks of tokens.

A block mask is written for the model's sequence ([text | image]). Over all ranks, the tokens have another order: the
first rank's text, its image, the second rank's text, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention import attend_across
from lightning_cp.attention.call import settings_of
from lightning_cp.attention.key_cache import KeyCache
from lightning_cp.attention.sparse import SparseMask
from lightning_cp.attention.sparse.handles import handle_of, is_block_mask, select
from lightning_cp.comm.shards import gather_shards
from lightning_cp.engine.attention.diffusers_dispatch import kernel_for
from lightning_cp.engine.session import Call, Session
from lightning_cp.engine.sharding.lengths import Sizes
from lightning_cp.errors import InterceptionError
from lightning_cp.mesh.groups import SINGLE_RANK, MeshGroups
from lightning_cp.plans import Attention, Modalities

# (query, key, value [b, s, h, d], block mask, scale=, grouped=, return_lse=) -> out, lse [b, s, h] or None
Attend = Callable[..., tuple[Tensor, Tensor | None]]


def mask_lengths(block_mask: Any) -> tuple[int, int]:
    """Return the number of queries and of keys of a block mask."""
    queries, keys = block_mask.lengths if isinstance(block_mask, SparseMask) else block_mask.seq_lengths
    return queries, keys


def handle_across(
    block_mask: Any, session: Session, fitting: Sequence[Attention] | None, cache: KeyCache | None, sizes: Sizes
) -> Tensor:
    """Return the handle of a block mask for queries and keys that are split over the ranks.

    Args:
        fitting: kinds of attention of the plan that have these sizes; None: the plan does not describe attention.
        cache: holds the keys of this attention; None: they are those of this forward.
        sizes: number of queries and of keys on each rank.
    Raises: InterceptionError: the mask has other lengths, or the order of the tokens is not known.
    """
    call = session.current()
    if call.evaluation is not None:
        raise InterceptionError("a block mask cannot be used with patches (PipeFusion): leave it out, or set patches=1")
    if not (sizes[0] and sizes[1]):
        raise InterceptionError(
            "a block mask needs known numbers of queries and keys on each rank, but here token counts are ambiguous, "
            "keys of earlier forwards are used, or the model drops padding tokens: use an attention mask"
        )
    whole = sum(sizes[0]), sum(sizes[1])
    if not torch.compiler.is_compiling() and mask_lengths(block_mask) != whole:  # compiled: the operator checks it
        raise InterceptionError(
            f"the block mask is of {mask_lengths(block_mask)} queries and keys, but attention has {whole} on all ranks "
            "together: make it for the whole sequence. (A text with fewer tokens than ranks may be padded to one token "
            "per rank: use lower degrees.)"
        )
    if fitting is None:
        _check_alone(call, sizes)
        return handle_of(block_mask)
    if cache is not None:
        in_rank_order = isinstance(block_mask, SparseMask) and block_mask.orders[1] is not None
        return handle_of(block_mask) if in_rank_order else select(handle_of(block_mask), [], cache.places)
    places = [
        [_places(session, kind, x) for x in (kind.queries, kind.queries if kind.keys is None else kind.keys)]
        for kind in fitting
    ]
    if any(x != places[0] for x in places):
        raise InterceptionError(
            f"a block mask is used in attention of {', or of '.join(' + '.join(x.queries) for x in fitting)}: these "
            "calls have the same token counts and other orders of tokens. Make them in separate modules of the plan"
        )
    return select(handle_of(block_mask), *places[0])


def handle_here(block_mask: Any, call: Call, queries: int, keys: int) -> Tensor:
    """Return the handle of a block mask for keys that are whole on each rank, and all queries or this rank's.

    Raises: InterceptionError: the mask has other lengths, or the positions of this rank's queries are not known.
    """
    lengths, rank = mask_lengths(block_mask), call.groups.context_rank
    if lengths == (queries, keys):
        return handle_of(block_mask)
    fitting = [
        modality
        for modality, length in call.lengths.items()
        if length == lengths[0] and call.sizes_of(modality)[rank] == queries
    ]
    firsts = {sum(call.division(modality)[: rank + 1]) for modality in fitting}
    if len(firsts) != 1 or keys != lengths[1] or call.evaluation is not None:
        raise InterceptionError(
            f"the block mask is of {lengths} queries and keys, but attention over whole keys has {queries} queries on "
            f"this rank and {keys} keys: make it for all tokens of one modality and all keys"
        )
    return select(handle_of(block_mask), (firsts.pop(), queries), ())


def _places(session: Session, kind: Attention, modalities: Modalities) -> list[int]:
    """Return the ranges of positions that ranks hold, in rank order, for `select`; empty: ascending."""
    call = session.current()
    present = [modality for modality in modalities if call.lengths.get(modality)]
    if len(present) < 2:
        return []
    order = session.model_plan.patches.order if session.model_plan.patches else ()
    if set(present) <= set(order):
        present.sort(key=order.index)
    elif not kind.ordered:
        raise InterceptionError(
            f"a block mask over {' + '.join(present)} needs the order of these modalities in attention: list them in "
            "this order for this module in `attention` of the plan"
        )
    start, by_rank = 0, [[] for _ in range(call.groups.context_size)]  # type: int, list[list[int]]
    for modality in present:
        first = start
        for rank, length in enumerate(call.sizes_of(modality)):
            by_rank[rank] += [first, length]
            first += length
        start = first
    return [n for places in by_rank for n in places]


def _check_alone(call: Call, sizes: Sizes) -> None:
    """Check that queries and keys are each of one modality, whose tokens ranks hold in ascending order."""
    lengths = [n for n in call.lengths.values() if n]
    sums = {a + b for i, a in enumerate(lengths) for b in lengths[i:]}
    for each in sizes:
        if not any(call.sizes((modality,)) == each for modality in call.lengths) or sum(each) in sums:
            raise InterceptionError(
                f"a block mask over {sum(each)} tokens cannot be used here: a plan in diffusers' format does not "
                "describe the order of several modalities. Use a lightning_cp.plans.Plan"
            )


def token_mask(mask: Tensor) -> Tensor:
    """Return the mask of the tokens [..., s] from its outer product [..., s, s]: the diagonal holds the squares."""
    squares = mask.diagonal(dim1=-2, dim2=-1)
    return squares.sqrt() if squares.is_floating_point() else squares


def gather_token_mask(mask: Tensor, lengths: Sequence[int], groups: MeshGroups) -> Tensor:
    """All-gather the mask of the tokens [..., s_local], in rank order.

    Args: lengths: number of tokens on each rank. Ranks: all of the context group.
    """
    values = mask if mask.is_floating_point() else mask.to(torch.uint8)
    return gather_shards(values.contiguous(), values.ndim - 1, list(lengths), groups.name).to(mask.dtype)


def outer_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the outer product [..., q, k] of the masks of queries and keys."""
    return queries.unsqueeze(-1) * keys.unsqueeze(-2)


def call_flex(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: object = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: object = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute `flex_attention` with another function; tensors are [b, h, s, d].

    Args: attend: see `Attend`. kernel_options: not used; they only tune kernels. Others: see `flex_attention`.
    Raises: InterceptionError: `score_mod` or `max_scores`.
    """
    if score_mod is not None:
        raise InterceptionError(
            "flex_attention was called with score_mod, which cannot be computed across ranks: use a block mask, or "
            "F.scaled_dot_product_attention with an additive mask"
        )
    if block_mask is not None and not is_block_mask(block_mask):
        raise InterceptionError(
            f"block_mask is a {type(block_mask).__name__}: it must be a BlockMask or a lightning_cp.SparseMask"
        )
    if return_aux is not None and return_aux.max_scores:
        raise InterceptionError(
            "flex_attention's return_aux requests max_scores, which context-parallel attention does not compute: "
            "request the lse only"
        )
    with_lse = return_lse if return_aux is None else return_aux.lse
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = attend(q, k, v, block_mask, scale=scale, grouped=enable_gqa, return_lse=with_lse)
    out, lse = out.transpose(1, 2), None if lse is None else lse.transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput  # here, because older versions have no AuxRequest

        return out, AuxOutput(lse=lse)
    return out if lse is None else (out, lse)


def attend_here(
    session: Session,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Any = None,
    *,
    scale: float | None,
    backend: Any = None,
    grouped: bool = True,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention over keys that are whole on each rank, without communication; tensors are [b, s, h, d].

    Args: block_mask: mask of the whole sequence, see `handle_here`; None: no mask.
    """
    settings = settings_of(
        query.shape[-1],
        causal=False,
        scale=scale,
        groups=SINGLE_RANK.name,
        config=session.config,
        kernel=kernel_for(session, backend),
        grouped=grouped,
    )
    counts = query.shape[1], key.shape[1]
    handle = None if block_mask is None else handle_here(block_mask, session.current(), *counts)
    result = attend_across(
        query, key, value, None, settings, lengths=([], []), block_mask=handle, return_lse=return_lse
    )
    return result if isinstance(result, tuple) else (result, None)
