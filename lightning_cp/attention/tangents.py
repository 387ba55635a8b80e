"""Forward derivative of attention: tangents of out and lse from tangents of q, k and v, in one pass over the ring.

With P = exp(scale q k + mask - lse), where lse is over all keys, and dS = scale (dq k + q dk):

    d(lse) = sum(P dS)        d(out) = sum(P (dS v + dv)) - d(lse) out

Out and lse are known from forward, so the contributions of all chunks are added; no merge is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.attention.keys import Ring, key_tangents
from lightning_cp.attention.prepared import prepared_again
from lightning_cp.attention.ring import ring_keys
from lightning_cp.attention.ulysses import partial_to_tokens, tokens_to_heads
from lightning_cp.kernels import Inputs, PartialAttention
from lightning_cp.mesh import groups_by_name


def attention_tangents(
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    encoded_lengths: Tensor,
    query_shape: list[int],
    key_shape: list[int],
    with_lse: bool,
    causal: bool,
    scale: float,
    groups: str,
    rotate_method: str,
    accumulate_fp32: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Compute the tangents of out [b, s_local, hq, d] and lse [b, s_local, hq].

    With Ulysses the tangent of lse is empty unless `with_lse`.

    Args:
        dq, dk, dv: tangents of the inputs, as in the formulas above; None: 0.
        q, k, v, out, lse, mask, encoded_lengths: tensors saved by `operator.attention`.
        query_shape, key_shape: shapes of the inputs query and key.
        with_lse, causal, ...: see `operator.attention`.
    Ranks: all of the context group.
    """
    mesh_groups, settings = groups_by_name(groups), (causal, scale, kernel, rotate_method, accumulate_fp32)
    shapes = (query_shape, key_shape, key_shape)
    given = zip((dq, dk, dv), shapes, strict=True)
    tangents = Inputs(*(q.new_zeros(shape) if x is None else x for x, shape in given))
    ring, ulysses = prepared_again(encoded_lengths, query_shape[2], key_shape[2], groups=mesh_groups, settings=settings)
    if ulysses is not None and ulysses.is_joint:
        q, k, v = ulysses.of_all.own(q)
    if ulysses is not None:
        tangents = Inputs(*tokens_to_heads(*tangents, None, to=ulysses)[:3])
    contribution = ring_tangents(Inputs(q, k, v), tangents, PartialAttention(out, lse), mask, ring=ring)
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
    for heads, start, key, value, chunk_mask in ring_keys(q, keys, values, mask, ring=ring):
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
