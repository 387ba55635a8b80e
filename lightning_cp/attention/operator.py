"""Attention as two PyTorch custom operators, forward and backward, in eager, compiled and checkpointed code.

All collectives of one attention run inside one operator, so that a compiler cannot reorder or drop some of them.
Process groups are passed by name; see `mesh.groups_by_name`. The derivatives are in `derivatives.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from lightning_cp.attention.call import Lengths, Settings, check_tensors, ulysses_of
from lightning_cp.attention.grid import grid_backward, grid_forward
from lightning_cp.attention.prepared import prepare_attention, prepared_again
from lightning_cp.attention.sparse.handles import mask_of_handle
from lightning_cp.attention.ulysses import grads_to_tokens, partial_to_tokens, queries_to_heads, tokens_to_heads
from lightning_cp.compat.compiler import keep_order_of_attentions
from lightning_cp.errors import ShapeError
from lightning_cp.kernels import PartialAttention, PartialAttentionGrad, accumulation_dtype_of
from lightning_cp.mesh.groups import groups_by_name

# out, lse, and tensors saved for backward: with Ulysses the exchanged q, k, v, mask, out and lse (otherwise empty:
# backward uses the inputs and results), and the encoded lengths, on the host. If q, k and v were exchanged as one
# tensor (`Ulysses.is_joint`), it takes the place of q; k and v are empty.
ForwardResults = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
LIBRARY = torch.library.Library("lightning_cp", "FRAGMENT")  # type: ignore[no-untyped-call]


_SETTINGS = ", ".join(f"{kind.__name__} {name}" for name, kind in get_type_hints(Settings).items())


def _define(body: Callable[..., Any], name: str, inputs: str, results: int) -> Any:
    """Define the operator `lightning_cp::<name>` for all devices: its inputs, and a call's `Settings` one by one.

    Without the checks of `torch.library.custom_op`, which take longer than this package's own code. So `body` must
    return new tensors that share no memory.
    """
    schema = f"{name}({inputs}, {_SETTINGS}) -> ({', '.join(['Tensor'] * results)})"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.lightning_cp, name).default


def run_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    block_mask: Tensor | None,
    q_lengths: list[int],
    kv_lengths: list[int],
    with_lse: bool,
    *settings: Any,
) -> ForwardResults:
    """Compute attention: query [b, s_local, hq, d] -> out, same shape, and lse [b, s_local, hq].

    With Ulysses lse is empty unless `with_lse`. block_mask: see `sparse.handles`. The other arguments: see
    `exchange_lengths` and `Settings`.
    """
    sparse = None if block_mask is None else mask_of_handle(block_mask)
    if sparse is not None:
        sparse.check_source()
    call = prepare_attention(
        query, key, value, mask, q_lengths=q_lengths, kv_lengths=kv_lengths, settings=Settings(*settings), sparse=sparse
    )
    ring, ulysses, encoded_lengths = call.ring, call.ulysses, call.encoded_lengths.clone()
    if ulysses is None:
        part = grid_forward(query, key, value, mask, ring=ring)
        none = [query.new_empty(0) for _ in range(6)]
        return part.out.contiguous(), part.lse.contiguous(), *none, encoded_lengths  # type: ignore[return-value]
    if ulysses.is_joint:
        joined = ulysses.of_all.to_heads((query, key, value))
        q, k, v = ulysses.of_all.own(joined)
        part = grid_forward(q, k, v, None, ring=ring)
        kept: tuple[Tensor, ...] = (joined, *(query.new_empty(0) for _ in range(3)))
    else:
        q, k, v, m = tokens_to_heads(query, key, value, mask, to=ulysses)
        part = grid_forward(q, k, v, m, ring=ring)
        kept = (q, k, v, q.new_empty(0) if m is None else m)
    out, lse = partial_to_tokens(part, with_lse=with_lse, to=ulysses)
    saved = (*kept, part.out.contiguous(), part.lse.contiguous())
    return out.contiguous(), lse.contiguous(), *saved, encoded_lengths  # type: ignore[return-value]


attention = _define(
    run_attention,
    "attention",
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? block_mask, "
    "SymInt[] q_lengths, SymInt[] kv_lengths, bool with_lse",
    len(get_args(ForwardResults)),
)


@torch.library.register_fake("lightning_cp::attention", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    block_mask: Tensor | None,
    q_lengths: list[int],
    kv_lengths: list[int],
    with_lse: bool,
    *settings: Any,
) -> ForwardResults:
    keep_order_of_attentions()
    call = Settings(*settings)
    mesh_groups = groups_by_name(call.groups)
    has_block_mask = block_mask is not None
    check_tensors(query, key, value, mask, groups=mesh_groups, settings=call, has_block_mask=has_block_mask)
    lse_dtype = accumulation_dtype_of(query.dtype)
    out, lse = query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=lse_dtype)
    encoded_lengths = torch.empty(3 * mesh_groups.context_size + 1, dtype=torch.int64, device="cpu")
    degree = mesh_groups.context_shape[1]
    if degree == 1:
        return out, lse, *[query.new_empty(0) for _ in range(6)], encoded_lengths  # type: ignore[return-value]
    if not (q_lengths and kv_lengths):
        raise ShapeError("torch.compile with ulysses_degree > 1 needs the arguments q_lengths and kv_lengths")
    mask_kind = "" if mask is None else "mask"  # which one has no influence on the shapes here
    lengths = Lengths(tuple(q_lengths), tuple(kv_lengths), mask_kind, ())
    ulysses = ulysses_of(lengths, query.shape[2], key.shape[2], groups=mesh_groups)
    assert ulysses is not None, "the Ulysses degree is above 1"
    own_heads, sq, sk = ulysses.own_heads, sum(ulysses.q_lengths), sum(ulysses.kv_lengths)
    b, _, _, d = query.shape
    hq = own_heads.num_queries
    if ulysses.is_joint:
        q = query.new_empty(sq, b, ulysses.of_all.widths[ulysses.rank], d)
        k, v = query.new_empty(0), query.new_empty(0)
    else:
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


def run_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    saved: list[Tensor],
    mask: Tensor | None,
    block_mask: Tensor | None,
    encoded_lengths: Tensor,
    key_shape: list[int],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv, in the shapes of the inputs, from grad_out [b, s_local, hq, d].

    Args:
        grad_lse: gradient of lse; None if lse was not used.
        saved: q, k, v, out and lse of the ring, that is, after the Ulysses exchange. See `ForwardResults`.
        mask: mask after the Ulysses exchange.
        block_mask: see `sparse.handles`.
        encoded_lengths: result of `encode_lengths`.
        key_shape: shape of the key passed to forward.
        settings: see `Settings`.
    """
    ring, ulysses = prepared_again(
        encoded_lengths,
        grad_out.shape[2],
        key_shape[2],
        settings=Settings(*settings),
        sparse=None if block_mask is None else mask_of_handle(block_mask),
        device=grad_out.device,
    )
    q, k, v, out, lse = saved
    if ulysses is not None and ulysses.is_joint:
        q, k, v = ulysses.of_all.own(q)
    if ulysses is None:
        grads = grid_backward(
            PartialAttentionGrad(grad_out, grad_lse), q, k, v, PartialAttention(out, lse), mask, ring=ring
        )
    else:
        grad = queries_to_heads([grad_out] if grad_lse is None else [grad_out, grad_lse], to=ulysses)
        part_grad = PartialAttentionGrad(grad[0], None if grad_lse is None else grad[1])
        of_heads = list(grid_backward(part_grad, q, k, v, PartialAttention(out, lse), mask, ring=ring))
        grads = grads_to_tokens(of_heads, to=ulysses)
    return grads.query.contiguous(), grads.key.contiguous(), grads.value.contiguous()


attention_backward = _define(
    run_attention_backward,
    "attention_backward",
    "Tensor grad_out, Tensor? grad_lse, Tensor[] saved, Tensor? mask, Tensor? block_mask, Tensor encoded_lengths, "
    "SymInt[] key_shape",
    3,
)


@torch.library.register_fake("lightning_cp::attention_backward", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    saved: list[Tensor],
    mask: Tensor | None,
    block_mask: Tensor | None,
    encoded_lengths: Tensor,
    key_shape: list[int],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = saved[0].dtype
    key, value = (grad_out.new_empty(key_shape, dtype=dtype) for _ in range(2))
    return grad_out.new_empty(grad_out.shape, dtype=dtype), key, value
