"""`context_parallel_attention`: attention over tokens that several ranks hold together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from lightning_cp.attention.async_ulysses import InTransit, attend_in_transit
from lightning_cp.attention.call import Settings, report_refusal
from lightning_cp.attention.derivatives import call_attention
from lightning_cp.config import ContextParallelConfig, context_config
from lightning_cp.mesh import ALONE, groups_for


@overload
def context_parallel_attention(
    query: Tensor | InTransit,
    key: Tensor | InTransit,
    value: Tensor | InTransit,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    parallel_config: object,
    q_lengths: Sequence[int] | None = ...,
    kv_lengths: Sequence[int] | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def context_parallel_attention(
    query: Tensor | InTransit,
    key: Tensor | InTransit,
    value: Tensor | InTransit,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    parallel_config: object,
    q_lengths: Sequence[int] | None = ...,
    kv_lengths: Sequence[int] | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def context_parallel_attention(
    query: Tensor | InTransit,
    key: Tensor | InTransit,
    value: Tensor | InTransit,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    parallel_config: object,
    q_lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`F.scaled_dot_product_attention` over the tokens of all ranks of a context group, each holding some.

    The global order of tokens is rank order. Local lengths may differ between ranks, be 0, and differ between query
    and key.

    Args:
        query: [batch, seq_local, heads, head_dim]; like key and value a tensor, or what `start_ulysses` returned.
        key, value: [batch, keys_local, kv_heads, head_dim]; kv_heads divides heads (`enable_gqa`).
        attn_mask: bool (True = attend) or additive, where values <= finfo(dtype).min / 2 mean never.
            [batch, keys_local] or [batch or 1, heads or 1, 1, keys_local]: of the local keys, travels with them.
            [batch or 1, heads or 1, seq_local or 1, keys of all ranks]: rows of the local queries.
            Presence, dtype, kind, and which dims are 1, are the same on all ranks. It cannot require grad.
        dropout_p: must be 0: dropout of attention weights is not computed.
        is_causal: a query sees keys up to its own global position; with a mask both hold.
        scale: of the scores; None: head_dim ** -0.5.
        enable_gqa: allow kv_heads < heads.
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, lightning_cp's or diffusers'.
        q_lengths, kv_lengths: seq_local and keys_local of every rank of the context group; given, they save an
            exchange of sizes (and a host synchronisation) for each call.
        return_lse: return the log-sum-exp too.
    Returns: out [batch, seq_local, heads, head_dim] in the inputs' dtype, contiguous; with `return_lse` also lse
        [batch, seq_local, heads], natural log, float32 or wider, differentiable. A query that may attend to no key: out
        0, lse -inf, no gradient.
    Raises:
        ValueError: dropout; shapes, dtypes, lengths or masks that do not fit; a kernel that cannot compute this.
        TypeError: parallel_config or a length of a wrong kind.
    Ranks: all of the context group. Communication by rank and call, n ranks, b batch, s tokens a rank, h query heads, g
        kv heads, d head size, e bytes an element, even lengths, no mask:
        ring of n, forward: (n - 1) 2 b s g d e bytes; backward: as many for K and V again, and (n - 1) 2 b s g d w for
        their gradients, w = 4 with convert_to_fp32 (8 for float64), else e. In "alltoall" mode by n - 1 exchanges with
        neighbours forward and 2 (n - 1) backward; in "allgather" mode by c exchanges with all forward and 2 c backward,
        c slices of heads with about 4 MB (CPU) or 64 MB (CUDA) of gathered K and V each.
        Ulysses of n: 2 exchanges forward, b s (2 h + 2 g) d e (n - 1) / n bytes to others, 2 backward, the same; lse
        (with return_lse, and in backward where it was used) adds b s h max(e, 4) (n - 1) / n. A kv head that m ranks
        use counts m times.
        unified r x u: Ulysses' with n = u, and the ring's with n = r, u s tokens and g / u kv heads.
        A mask of keys travels too, by its own bytes: with K and V around the ring, forward and backward (gathered: by
        an exchange of its own), and once through Ulysses; one of rows stays, but for Ulysses. Around the ring every
        tensor is rounded up to 16 bytes. Without lengths one exchange of 15 ints comes first, in forward only.
    Gradient: exact for query, key and value, through both results. A second derivative raises NotImplementedError.
    Forward derivative (torch.func.jvp, torch.autograd.forward_ad): exact; around the ring K and V pass once more, with
        their tangents, and Ulysses exchanges the tangents. A gradient through a tangent raises NotImplementedError.
    Source: Liu et al., arXiv:2310.01889 (ring); Jacobs et al., arXiv:2309.14509 (Ulysses); Fang and Zhao,
        arXiv:2405.07719 (unified).
    """
    config = context_config(parallel_config)
    groups = ALONE if config.mesh_shape == (1, 1) else groups_for(config)
    try:
        _check_kinds(query=query, key=key, value=value, attn_mask=attn_mask)
        _check_settings(dropout_p, is_causal, scale, enable_gqa)
        sizes = [_lengths(name, x) for name, x in (("q_lengths", q_lengths), ("kv_lengths", kv_lengths))]
    except (TypeError, ValueError):
        if q_lengths is None or kv_lengths is None:
            report_refusal(groups)
        raise
    lengths = (sizes[0], sizes[1])
    if isinstance(query, InTransit) or isinstance(key, InTransit) or isinstance(value, InTransit):
        return _attend_in_transit(
            *(query, key, value, attn_mask),
            causal=is_causal,
            scale=scale,
            grouped=enable_gqa,
            lengths=lengths,
            config=config,
            return_lse=return_lse,
        )
    return attend_across(
        *(query, key, value, attn_mask),
        causal=is_causal,
        scale=scale,
        grouped=enable_gqa,
        lengths=lengths,
        groups=groups.name,
        config=config,
        kernel="auto",
        return_lse=return_lse,
    )


def _attend_in_transit(
    query: Tensor | InTransit,
    key: Tensor | InTransit,
    value: Tensor | InTransit,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    grouped: bool,
    lengths: tuple[list[int], list[int]],
    config: ContextParallelConfig,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the ring, inside the exchanges that `start_ulysses` has begun."""
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    if mask is not None and mask.ndim == 2 and mask.shape == key.shape[:2]:
        mask = mask[:, None, None, :]

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, groups: str, lengths: tuple[list[int], list[int]]
    ) -> tuple[Tensor, Tensor]:
        found = attend_across(
            *(q, k, v, mask),
            causal=causal,
            scale=scale,
            grouped=grouped,
            lengths=lengths,
            groups=groups,
            config=config,
            kernel="auto",
            return_lse=True,
        )
        assert isinstance(found, tuple), "with its log-sum-exp"
        return found

    settings = Settings(causal, scale, "auto", config.rotate_method, config.convert_to_fp32, grouped)
    tensors = {"query": query, "key": key, "value": value}
    out, lse = attend_in_transit(
        tensors, mask, settings=settings, config=config, lengths=lengths, attend=attend, with_lse=return_lse
    )
    return out if lse is None else (out, lse)


def attend_across(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    grouped: bool,
    lengths: tuple[list[int], list[int]],
    groups: str,
    config: ContextParallelConfig,
    kernel: str,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`context_parallel_attention` with its settings resolved, for the engine: traceable, no look-ups.

    lengths: of queries and keys on every rank, empty where not known; groups: `MeshGroups.name`; kernel: a name.
    """
    # Nothing is refused here: an error must reach the ranks that wait for this one's sizes, see `call.agree`.
    if mask is not None and mask.ndim == 2 and mask.shape == key.shape[:2]:
        mask = mask[:, None, None, :]
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    out, lse = call_attention(
        *(query, key, value, mask, causal, scale, grouped),
        *(*lengths, groups, config.rotate_method, config.convert_to_fp32, kernel, return_lse),
    )
    return (out, lse) if return_lse else out


def _check_kinds(**tensors: object) -> None:
    for name, x in tensors.items():
        if isinstance(x, InTransit) and name != "attn_mask":
            continue
        if not isinstance(x, Tensor) and not (name == "attn_mask" and x is None):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")


def _check_settings(dropout_p: object, is_causal: object, scale: object, enable_gqa: object) -> None:
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p}: dropout of attention weights is not computed; give 0.0")
    for name, value in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True or False")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale={scale!r} must be a number, or None for head_dim ** -0.5")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale!r} must be finite")


def _lengths(name: str, lengths: Sequence[int] | None) -> list[int]:
    if lengths is None:
        return []
    if not isinstance(lengths, (list, tuple)) or any(isinstance(x, bool) or not isinstance(x, int) for x in lengths):
        raise TypeError(f"{name}={lengths!r} must be a list with one int for each rank of the context group")
    return list(lengths)
