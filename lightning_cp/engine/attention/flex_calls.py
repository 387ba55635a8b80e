"""Calls of torch's `flex_attention`, and attention with a block mask over keys that are whole on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_cp.attention import attend_across
from lightning_cp.attention.call import settings_of
from lightning_cp.attention.sparse.handles import is_block_mask
from lightning_cp.engine.attention.diffusers_dispatch import kernel_for
from lightning_cp.engine.attention.masks import handle_here
from lightning_cp.engine.session import Session
from lightning_cp.errors import InterceptionError
from lightning_cp.mesh.groups import SINGLE_RANK

# (query, key, value [b, s, h, d], block mask, scale=, grouped=, return_lse=) -> out, lse [b, s, h] or None
Attend = Callable[..., tuple[Tensor, Tensor | None]]


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
