"""Attention as two PyTorch custom operators, forward and backward, in eager, compiled and checkpointed code.

All collectives of one attention run inside one operator, so that a compiler cannot reorder or drop some of them.
Process groups are passed by name; see `mesh.groups_by_name`. The derivatives are in `derivatives.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.attention.call import Lengths, Settings, check_tensors, exchange_lengths, ring_of, ulysses_of
from lightning_cp.attention.heads import assign_heads, head_shares
from lightning_cp.attention.ring import ring_backward, ring_forward
from lightning_cp.attention.ulysses import grads_to_tokens, partial_to_tokens, queries_to_heads, tokens_to_heads
from lightning_cp.compiler_options import keep_order_of_attentions
from lightning_cp.errors import ShapeError
from lightning_cp.kernels import PartialAttention, PartialAttentionGrad, accumulation_dtype_of
from lightning_cp.mesh import MeshGroups, groups_by_name

# out, lse, and tensors saved for backward: with Ulysses the exchanged q, k, v, mask, out and lse (otherwise empty:
# backward uses the inputs and results), and the encoded lengths, on the host.
ForwardResults = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("lightning_cp::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    grouped: bool,
    q_lengths: list[int],
    kv_lengths: list[int],
    groups: str,
    rotate_method: str,
    accumulate_fp32: bool,
    kernel: str,
    with_lse: bool,
) -> ForwardResults:
    """Compute attention: query [b, s_local, hq, d] -> out, same shape, and lse [b, s_local, hq].

    With Ulysses lse is empty unless `with_lse`. The other arguments: see `Settings` and `exchange_lengths`.
    """
    mesh_groups = groups_by_name(groups)
    settings = Settings(causal, scale, kernel, rotate_method, accumulate_fp32, grouped)
    lengths = exchange_lengths(
        query, key, value, mask, q_lengths=q_lengths, kv_lengths=kv_lengths, groups=mesh_groups, settings=settings
    )
    ring = ring_of(lengths, groups=mesh_groups, settings=settings)
    ulysses = ulysses_of(lengths, query.shape[2], key.shape[2], groups=mesh_groups)
    encoded_lengths = encode_lengths(lengths)
    if ulysses is None:
        part = ring_forward(query, key, value, mask, ring=ring)
        none = [query.new_empty(0) for _ in range(6)]
        return part.out.contiguous(), part.lse.contiguous(), *none, encoded_lengths  # type: ignore[return-value]
    q, k, v, m = tokens_to_heads(query, key, value, mask, to=ulysses)
    part = ring_forward(q, k, v, m, ring=ring)
    out, lse = partial_to_tokens(part, with_lse=with_lse, to=ulysses)
    saved = (q, k, v, q.new_empty(0) if m is None else m, part.out.contiguous(), part.lse.contiguous())
    return out.contiguous(), lse.contiguous(), *saved, encoded_lengths


@attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    grouped: bool,
    q_lengths: list[int],
    kv_lengths: list[int],
    groups: str,
    rotate_method: str,
    accumulate_fp32: bool,
    kernel: str,
    with_lse: bool,
) -> ForwardResults:
    keep_order_of_attentions()
    mesh_groups = groups_by_name(groups)
    settings = Settings(causal, scale, kernel, rotate_method, accumulate_fp32, grouped)
    check_tensors(query, key, value, mask, groups=mesh_groups, settings=settings)
    lse_dtype = accumulation_dtype_of(query.dtype)
    out, lse = query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=lse_dtype)
    encoded_lengths = torch.empty(3 * mesh_groups.context_size + 1, dtype=torch.int64, device="cpu")
    degree = mesh_groups.context_shape[1]
    if degree == 1:
        return out, lse, *[query.new_empty(0) for _ in range(6)], encoded_lengths  # type: ignore[return-value]
    if not (q_lengths and kv_lengths):
        raise ShapeError("torch.compile with ulysses_degree > 1 needs the arguments q_lengths and kv_lengths")
    ulysses_ranks = slice(mesh_groups.ring_rank * degree, (mesh_groups.ring_rank + 1) * degree)
    sq, sk = sum(q_lengths[ulysses_ranks]), sum(kv_lengths[ulysses_ranks])
    own_heads = assign_heads(query.shape[2], key.shape[2], degree, head_shares(mesh_groups))[mesh_groups.ulysses_rank]
    b, _, _, d = query.shape
    hq = own_heads.num_queries
    q = query.new_empty(sq, b, hq, d).transpose(0, 1)
    if not own_heads.ragged:
        k, v = (key.new_empty(sk, b, own_heads.num_keys, d).transpose(0, 1) for _ in range(2))
    else:
        k, v = (key.new_empty(b, sk, hq, d) for _ in range(2))
    m = query.new_empty(0)
    if mask is not None:
        heads = 1 if mask.shape[1] == 1 else hq
        is_key_mask = mask.shape[2] == 1 and mask.shape[3] == key.shape[1]
        size = (1, sk) if is_key_mask else (sq, mask.shape[3])
        m = mask.new_empty(mask.shape[0], heads, *size)
    saved = (q, k, v, m, query.new_empty(b, sq, hq, d), query.new_empty(b, sq, hq, dtype=lse_dtype))
    return out, lse if with_lse else lse.new_empty(0), *saved, encoded_lengths


@torch.library.custom_op("lightning_cp::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    saved: list[Tensor],
    mask: Tensor | None,
    encoded_lengths: Tensor,
    key_shape: list[int],
    causal: bool,
    scale: float,
    groups: str,
    rotate_method: str,
    accumulate_fp32: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv, in the shapes of the inputs, from grad_out [b, s_local, hq, d].

    Args:
        grad_lse: gradient of lse; None if lse was not used.
        saved: q, k, v, out and lse of the ring, that is, after the Ulysses exchange.
        mask: mask after the Ulysses exchange.
        encoded_lengths: result of `encode_lengths`.
        key_shape: shape of the key passed to forward.
    """
    mesh_groups, settings = groups_by_name(groups), Settings(causal, scale, kernel, rotate_method, accumulate_fp32)
    lengths = decode_lengths(encoded_lengths, mesh_groups)
    q, k, v, out, lse = saved
    ring = ring_of(lengths, groups=mesh_groups, settings=settings)
    ulysses = ulysses_of(lengths, grad_out.shape[2], key_shape[2], groups=mesh_groups)
    if ulysses is None:
        grads = ring_backward(
            PartialAttentionGrad(grad_out, grad_lse), q, k, v, PartialAttention(out, lse), mask, ring=ring
        )
    else:
        grad = queries_to_heads([grad_out] if grad_lse is None else [grad_out, grad_lse], to=ulysses)
        part_grad = PartialAttentionGrad(grad[0], None if grad_lse is None else grad[1])
        grads = ring_backward(part_grad, q, k, v, PartialAttention(out, lse), mask, ring=ring)
        grads = grads_to_tokens(grads, to=ulysses)
    return grads.query.contiguous(), grads.key.contiguous(), grads.value.contiguous()


@attention_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    saved: list[Tensor],
    mask: Tensor | None,
    encoded_lengths: Tensor,
    key_shape: list[int],
    causal: bool,
    scale: float,
    groups: str,
    rotate_method: str,
    accumulate_fp32: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = saved[0].dtype
    key, value = (grad_out.new_empty(key_shape, dtype=dtype) for _ in range(2))
    return grad_out.new_empty(grad_out.shape, dtype=dtype), key, value


def encode_lengths(lengths: Lengths) -> Tensor:
    """Encode lengths and kind of mask as an int64 tensor on the host, since an operator returns only tensors."""
    kind = ("", "key_mask", "query_mask").index(lengths.mask_kind)
    return torch.tensor(
        [kind, *lengths.query, *lengths.key, *lengths.mask_query_sizes], dtype=torch.int64, device="cpu"
    )


def decode_lengths(encoded_lengths: Tensor, groups: MeshGroups) -> Lengths:
    """Decode the result of `encode_lengths`."""
    kind, *numbers = encoded_lengths.tolist()
    size = groups.context_size
    query, key, mask_queries = (tuple(numbers[i * size : (i + 1) * size]) for i in range(3))
    return Lengths(query, key, ("", "key_mask", "query_mask")[kind], mask_queries)
