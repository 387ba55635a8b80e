"""`context_parallel_attention`: attention over tokens sharded across ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from lightning_cp.attention.call import Settings, four_dims, report_refusal, settings_of
from lightning_cp.attention.derivatives import call_attention
from lightning_cp.attention.sparse.handles import handle_of
from lightning_cp.config import context_config
from lightning_cp.mesh.groups import SINGLE_RANK, groups_for


@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    parallel_config: object,
    q_lengths: Sequence[int] | None = ...,
    kv_lengths: Sequence[int] | None = ...,
    shares: Sequence[float] | None = ...,
    block_mask: Any = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    parallel_config: object,
    q_lengths: Sequence[int] | None = ...,
    kv_lengths: Sequence[int] | None = ...,
    shares: Sequence[float] | None = ...,
    block_mask: Any = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    parallel_config: object,
    q_lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
    shares: Sequence[float] | None = None,
    block_mask: Any = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `F.scaled_dot_product_attention` over tokens sharded across the ranks of a context group.

    Shards are in rank order. Local lengths may differ between ranks, may be 0, and may differ between query and key.

    Args:
        query: [batch, seq_local, heads, head_dim].
        key, value: [batch, keys_local, kv_heads, head_dim]; kv_heads divides heads (`enable_gqa`).
        attn_mask: bool (True = attend) or additive; values <= finfo(dtype).min / 2 mask the key completely.
            [batch, keys_local] or [batch or 1, heads or 1, 1, keys_local]: mask of the local keys, sent with them.
            [batch or 1, heads or 1, seq_local or 1, keys of all ranks]: mask of the local queries over all keys.
            All ranks pass a mask or none does, with the same dtype, kind and dims of size 1. It cannot require grad.
        dropout_p: must be 0: dropout of attention weights is not implemented.
        is_causal: a query sees keys up to its own global position; combined with the mask, if any.
        scale: factor on the scores; None: head_dim ** -0.5.
        enable_gqa: allow kv_heads < heads.
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, lightning_cp's or diffusers'.
        q_lengths, kv_lengths: seq_local and keys_local of every rank of the context group, in rank order. They save
            an exchange of sizes (and a host synchronisation) per call.
        shares: for unequal devices, the weight of each rank of the context group, by which Ulysses divides heads;
            None: equal. Tokens are divided by the caller (`strategy.shard`).
        block_mask: a `BlockMask` of torch's flex attention, or a `SparseMask`, over the whole sequence, the same on all
            ranks. Empty blocks cost no computation, and ranks send each other only the keys of blocks that
            are not empty. Not with attn_mask or is_causal.
        return_lse: also return the log-sum-exp (LSE).
    Returns: out [batch, seq_local, heads, head_dim] in the inputs' dtype, contiguous; with `return_lse` also lse
        [batch, seq_local, heads], natural log, float32 or wider, differentiable. A query without a key to attend to has
        out 0, lse -inf and no gradient.
    Raises:
        ValueError: dropout_p is not 0; shapes, dtypes, lengths or masks do not match; the kernel cannot compute this.
        TypeError: parallel_config or a length has a wrong type.
    Ranks: all of the context group. Bytes sent per rank and call, for n ranks, b samples, s tokens per rank, h query
        heads, g KV heads, head size d, e bytes per element, equal lengths and no mask:
        Ring of n: forward (n - 1) 2 b s g d e. Backward: the same for K and V again, plus (n - 1) 2 b s g d w for dK
        and dV; w = 4 with convert_to_fp32 (8 for float64), otherwise w = e. "alltoall" mode: n - 1 exchanges with
        neighbours in forward, 2 (n - 1) in backward. "allgather" mode: c exchanges with all ranks in forward, 2 c in
        backward, for c slices of heads, each with about 4 MB (CPU) or 64 MB (CUDA) of gathered K and V.
        Ulysses of n: forward b s (2 h + 2 g) d e (n - 1) / n, in 2 exchanges; backward the same. lse (with return_lse,
        and in backward if it was used) adds b s h max(e, 4) (n - 1) / n. A KV head that m ranks use counts m times.
        Grid of r rows, m columns ("grid"): in the column as "allgather" with n = r. In the row, with p = h max(e, 4),
        forward (m - 1) b s (2 h d e + p) in 1 + c exchanges; backward (m - 1) b s (3 h d e + 2 p) in 2, and with the
        gradient of lse 3 p. Each tensor of a token is padded to 16 bytes.
        Unified r x u: the Ulysses bytes with n = u, plus the ring bytes with n = r, u s tokens and g / u KV heads.
        Masks: a mask of the local keys is sent with K and V around the ring, in forward and backward ("allgather"
        mode: in a separate exchange), and once through Ulysses. A mask of the local queries is sent by Ulysses, and
        in forward and backward by a grid: to each other rank of the row the part for the keys of its column.
        With block_mask a rank sends each other rank of the ring only the keys of blocks that are not empty for that
        rank, in c exchanges with all ranks; "alltoall" mode rotates chunks if these keys would take more than two.
        "alltoall" mode pads every tensor to 16 bytes. Without lengths, with block_mask, and in the first call of a
        kind, forward first exchanges 18 ints.
    Gradient: exact for query, key and value, through out and lse. A second derivative raises NotImplementedError.
    Forward derivative (torch.func.jvp, torch.autograd.forward_ad): exact. K, V and their tangents go around the ring
        again, and Ulysses exchanges the tangents. A gradient through a tangent raises NotImplementedError.
    Source: Liu et al., arXiv:2310.01889 (ring); Jacobs et al., arXiv:2309.14509 (Ulysses); Fang and Zhao,
        arXiv:2405.07719 (unified); NVIDIA, TensorRT-LLM's Attention2D (grid).
    """
    config = context_config(parallel_config)
    groups = SINGLE_RANK if config.mesh_shape == (1, 1) else groups_for(config, shares)
    try:
        check_types(query=query, key=key, value=value, attn_mask=attn_mask)
        check_settings(dropout_p, is_causal, scale, enable_gqa)
        handle = None if block_mask is None else handle_of(block_mask)
        sizes = [lengths_of(name, x) for name, x in (("q_lengths", q_lengths), ("kv_lengths", kv_lengths))]
    except (TypeError, ValueError):
        if q_lengths is None or kv_lengths is None or block_mask is not None:
            report_refusal(groups)
        raise
    settings = settings_of(
        query.shape[-1], causal=is_causal, scale=scale, groups=groups.name, config=config, grouped=enable_gqa
    )
    lengths = (sizes[0], sizes[1])
    return attend_across(
        query, key, value, attn_mask, settings, lengths=lengths, block_mask=handle, return_lse=return_lse
    )


def attend_across(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    settings: Settings,
    *,
    lengths: tuple[list[int], list[int]],
    block_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `context_parallel_attention` from resolved settings, for the engine. Traceable by torch.compile.

    Args:
        lengths: number of queries and of keys on each rank, in rank order; empty if unknown.
        block_mask: handle of the mask of the whole sequence, see `sparse.handles`.
    """
    # Do not raise here: peers may wait for this rank's sizes. `call.exchange_lengths` checks and raises on all ranks.
    mask = four_dims(mask, key)
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(attention_dtype(x)) for x in (query, key, value))
    out, lse = call_attention(query, key, value, mask, block_mask, *lengths, return_lse, *settings)
    return (out, lse) if return_lse else out


def check_types(**tensors: object) -> None:
    """Check that arguments are tensors (only `attn_mask` may be None). Raises: TypeError."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and not (name == "attn_mask" and x is None):
            remedy = "; give a bool or additive mask" if name == "attn_mask" else ""
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}{remedy}")


def check_settings(dropout_p: object, is_causal: object, scale: object, enable_gqa: object) -> None:
    """Check the arguments that are no tensors. Raises: TypeError: a wrong type. ValueError: a wrong value."""
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p} must be 0: dropout of attention weights is not implemented")
    for name, value in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True or False")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale={scale!r} must be a number, or None for head_dim ** -0.5")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale!r} must be finite")


def lengths_of(name: str, lengths: Sequence[int] | None) -> list[int]:
    """Return the argument `q_lengths` or `kv_lengths` as a list, empty if it is None. Raises: TypeError."""
    if lengths is None:
        return []
    if type(lengths) is list and set(map(type, lengths)) == {int}:
        return lengths
    if not isinstance(lengths, (list, tuple)) or any(isinstance(x, bool) or not isinstance(x, int) for x in lengths):
        raise TypeError(f"{name}={lengths!r} must be a list with one int for each rank of the context group")
    return list(lengths)


def attention_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which attention computes `x`: that of autocast, if it is on and `x` is not float64."""
    device = x.device.type
    if x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)
