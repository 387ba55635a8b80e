"""Forward derivative of attention: tangents of out and lse from tangents of q, k and v, in one pass over the ring.

With P = exp(scale q k + mask - lse), where lse is over all keys, and dS = scale (dq k + q dk):

    d(lse) = sum(P dS)        d(out) = sum(P (dS v + dv)) - d(lse) out

Out and lse are known from forward, so the contributions of all chunks are added; no merge is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention.call import Settings
from lightning_cp.attention.keys import Ring, key_tangents
from lightning_cp.attention.prepared import prepared_again
from lightning_cp.attention.ring import ring_keys
from lightning_cp.attention.sparse.handles import mask_of_handle
from lightning_cp.attention.ulysses import partial_to_tokens, tokens_to_heads
from lightning_cp.kernels import Inputs, PartialAttention


def attention_tangents(
    tangents: Sequence[Tensor | None],
    saved: Sequence[Any],
    *,
    shapes: Sequence[Sequence[int]],
    with_lse: bool,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Compute the tangents of out [b, s_local, hq, d] and lse [b, s_local, hq].

    With Ulysses the tangent of lse is empty unless `with_lse`.

    Args:
        tangents: dq, dk and dv, as in the formulas above; None: 0.
        saved: q, k, v, out, lse, mask, block_mask and encoded_lengths, saved by `operator.attention`.
        shapes: shapes of the inputs query, key and value.
    Ranks: all of the context group.
    """
    q, k, v, out, lse, mask, block_mask, encoded_lengths = saved
    pairs = zip(tangents, shapes, strict=True)
    changes = Inputs(*(q.new_zeros(shape) if x is None else x for x, shape in pairs))
    ring, ulysses = prepared_again(
        encoded_lengths,
        shapes[0][2],
        shapes[1][2],
        settings=settings,
        sparse=None if block_mask is None else mask_of_handle(block_mask),
        device=out.device,
    )
    if ulysses is not None and ulysses.is_joint:
        q, k, v = ulysses.of_all.own(q)
    if ulysses is not None:
        changes = Inputs(*tokens_to_heads(*changes, None, to=ulysses)[:3])
    contribution = ring_tangents(Inputs(q, k, v), changes, PartialAttention(out, lse), mask, ring=ring)
    if ulysses is not None:
        contribution = partial_to_tokens(contribution, with_lse=with_lse, to=ulysses)
    return contribution.out.contiguous(), contribution.lse.contiguous()


def ring_tangents(
    inputs: Inputs, tangents: Inputs, part: PartialAttention, mask: Tensor | None, *, ring: Ring
) -> PartialAttention:
    """Compute the tangents of `ring_forward`'s out and lse.

    Args:
        inputs: q, k, v, see `ring_forward`.
        tangents: tangents of `inputs`, in their shapes and dtypes.
        part: the result of `ring_forward`.
        mask: see `ring_forward`; it has no tangent.
    Returns: tangents of out [b, sq_local, hq, d] in q's dtype and of lse [b, sq_local, hq]; 0 for queries without keys.
    Ranks: all of `ring.group`. Each sends K, V and their tangents n - 1 times, and a key mask.
    """
    q, d = inputs.query, inputs.query.shape[3]
    out = q.new_zeros(q.shape, dtype=ring.accumulation_dtype(q.dtype))
    lse = torch.zeros_like(part.lse)
    keys, values = (torch.cat(pair, -1) for pair in zip(inputs[1:], tangents[1:], strict=True))
    for heads, pieces in ring_keys(q, keys, values, mask, ring=ring):
        for start, key, value, chunk_mask in pieces:
            primals = Inputs(q[:, :, heads.query], key[..., :d], value[..., :d])
            chunk_tangents = Inputs(tangents.query[:, :, heads.query], key[..., d:], value[..., d:])
            contribution = key_tangents(
                primals, chunk_tangents, part.lse[:, :, heads.query], chunk_mask, start=start, ring=ring
            )
            if contribution is not None:
                out[:, :, heads.query] += contribution.out
                lse[:, :, heads.query] += contribution.lse
    out -= lse.unsqueeze(-1) * part.out
    return PartialAttention(out.to(q.dtype), lse)
