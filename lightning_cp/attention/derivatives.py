"""Derivatives of the attention operator: the gradient, and the forward derivative of `torch.func.jvp` and forward AD.

The operator has a gradient. A forward derivative needs an `autograd.Function`; `call_attention` calls the operator
through one while inputs may have tangents (see `comm/transforms.py`). Second derivatives raise NotImplementedError.

Tangents are computed in one pass over the ring. With P = exp(scale q k + mask - lse), where lse is over all keys, and
dS = scale (dq k + q dk):

    d(lse) = sum(P dS)        d(out) = sum(P (dS v + dv)) - d(lse) out

Out and lse are known from forward, so the contributions of all chunks are added; no merge is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention.call import Settings
from lightning_cp.attention.grid import grid_tangents
from lightning_cp.attention.operator import (
    LIBRARY,
    ForwardResults,
    attention,
    attention_backward,
    run_attention,
    run_attention_backward,
)
from lightning_cp.attention.prepared import prepared_again
from lightning_cp.attention.sparse.handles import mask_of_handle
from lightning_cp.attention.sparse.mask import MASK
from lightning_cp.attention.ulysses import partial_to_tokens, tokens_to_heads
from lightning_cp.comm.stats import STATS
from lightning_cp.comm.transforms import (
    Batched,
    apply_eagerly,
    loop_over_batch,
    primal_of,
    refuse_transform,
    transforms_are_on,
)
from lightning_cp.compat.torch_names import DispatchKey, below_autograd, below_autograd_keys
from lightning_cp.kernels import Inputs, PartialAttention, choose_tangent_kernel

_NO_SECOND_DERIVATIVE = (
    "a second derivative of context-parallel attention (a gradient of a gradient, or a forward derivative of a "
    "gradient) is not implemented: leave out create_graph=True (detach the gradient), or compute this loss on a model "
    "that is not context-parallel"
)
_NO_DERIVATIVE_OF_A_TANGENT = (
    "a derivative of a tangent (through the result of torch.func.jvp or torch.autograd.forward_ad) of context-parallel "
    "attention is not implemented: detach the tangent before it enters the loss, as MeanFlow's does, or compute this "
    "loss on a model that is not context-parallel"
)

_SETTINGS = 8  # index of the first setting in the operator's arguments
_DEVICES = (DispatchKey.CPU, DispatchKey.CUDA)  # keys of plain tensors, that is, of calls that only a device handles


def call_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Call `operator.attention` with support for first derivatives; unsupported derivatives raise.

    Args: see `operator.attention`, in its order.
    Returns: out and lse.
    Ranks: all of the context group. Either all ranks or no rank have a tangent in query, key or value.
    """
    out, lse, *_ = apply_eagerly(_Attention, *arguments) if transforms_are_on() else attention(*arguments)
    return out, lse


def _save(ctx: Any, inputs: tuple[Any, ...], output: ForwardResults) -> tuple[Tensor | None, ...]:
    """Save tensors for the derivatives.

    Returns: q, k, v, out, lse and mask after the Ulysses exchange, block mask, lengths, and with Ulysses the result
        lse. Autograd finds through it that a gradient depends on the inputs: no other saved tensor has a graph then.
    """
    query, key, value, mask, block_mask, _, _, with_lse, *settings = inputs
    out, lse, *ring_tensors, encoded_lengths = output
    saved: tuple[Tensor | None, ...]
    if ring_tensors[0].ndim == 4:
        q, k, v, m, part_out, part_lse = ring_tensors
        saved = (q, k, v, part_out, part_lse, m if m.ndim == 4 else None, block_mask, encoded_lengths, lse)
    else:
        saved = (query, key, value, out, lse, mask, block_mask, encoded_lengths, None)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved)
    ctx.block_mask = getattr(block_mask, MASK, None)  # kept alive if saved tensors are replaced (activation offloading)
    ctx.key_shape, ctx.out_shape, ctx.with_lse = list(key.shape), list(out.shape), with_lse
    ctx.module = STATS.module
    ctx.settings = settings
    return saved


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    *saved, mask, block_mask, encoded_lengths, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = saved[0].new_zeros(ctx.out_shape)
    with STATS.inside_module(ctx.module):
        if torch.is_grad_enabled() or transforms_are_on():
            grads = _AttentionBackward.apply(
                lse, grad_out, grad_lse, *saved, mask, block_mask, encoded_lengths, ctx.key_shape, *ctx.settings
            )  # type: ignore[no-untyped-call]
        else:
            grads = attention_backward(
                grad_out, grad_lse, saved, mask, block_mask, encoded_lengths, ctx.key_shape, *ctx.settings
            )
    return *grads, *[None] * 12


class _Dispatched(torch.autograd.Function):
    """`operator.attention` with a gradient, for the dispatcher."""

    @staticmethod
    def forward(ctx: Any, keys: Any, others: list[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return out and lse. Args: others: receives the results without a gradient, which autograd need not wrap."""
        results: ForwardResults = _without_autograd(attention, run_attention, keys, arguments)
        _save(ctx, arguments, results)
        others += results[2:]
        return results[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return None, None, *_backward(ctx, *grads)


def _autograd(keys: Any, *arguments: Any) -> ForwardResults:
    """Implement the operator with a gradient. `torch.library.register_autograd` takes 40 µs more for each call."""
    results: ForwardResults
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments[:3]):
        others: list[Tensor] = []
        results = (*_Dispatched.apply(keys, others, *arguments), *others)  # type: ignore[no-untyped-call]
    else:
        results = _without_autograd(attention, run_attention, keys, arguments)
    return results


def _backward_autograd(keys: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Implement the backward operator, with derivatives that raise."""
    grad_out, grad_lse, saved, *rest = arguments
    grads: tuple[Tensor, Tensor, Tensor]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (grad_out, grad_lse, *saved)):
        grads = _AttentionBackward.apply(None, grad_out, grad_lse, *saved, *rest)  # type: ignore[no-untyped-call]
    else:
        grads = _without_autograd(attention_backward, run_attention_backward, keys, arguments)
    return grads


def _without_autograd(operator: Any, body: Callable[..., Any], keys: Any, arguments: tuple[Any, ...]) -> Any:
    """Run an operator below autograd: call its body, unless a mode or subclass of Tensor handles it.

    Also below autograd's notes of views: it does not let callers change a result in place that is noted as one.
    """
    keys = keys & below_autograd_keys
    with below_autograd():
        if keys.highestPriorityTypeId() in _DEVICES:
            return body(*arguments)
        return operator.redispatch(keys, *arguments)


for _name, _body in (("attention", _autograd), ("attention_backward", _backward_autograd)):
    LIBRARY.impl(_name, _body, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """`operator.attention` with a gradient and a forward derivative."""

    @staticmethod
    def forward(*arguments: Any) -> ForwardResults:
        results: ForwardResults = attention(*arguments)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: ForwardResults) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_forward(*_save(ctx, inputs, output))

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        query, key, value, mask = tangents[:4]
        if mask is not None:
            raise NotImplementedError("attn_mask has a tangent, but its forward derivative is not computed: detach it")
        choose_tangent_kernel(Settings(*ctx.settings).kernel)
        saved = [None if x is None else primal_of(x) for x in ctx.saved_tensors[:-1]]
        arguments = (ctx.out_shape, ctx.key_shape, ctx.with_lse, *ctx.settings)
        out, lse = _Tangents.apply(query, key, value, *saved, *arguments)  # type: ignore[no-untyped-call]
        return out, lse, *[None] * 7

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Batched:
        return loop_over_batch(_Attention, info, in_dims, arguments)


class _AttentionBackward(torch.autograd.Function):
    """`operator.attention_backward` with each saved tensor as an argument. Its derivatives raise."""

    @staticmethod
    def forward(lse: object, grad_out: Tensor, grad_lse: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Args: lse: see `_save`. It is not read."""
        grads: tuple[Tensor, Tensor, Tensor] = attention_backward(grad_out, grad_lse, list(rest[:5]), *rest[5:])
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    backward = staticmethod(refuse_transform(_NO_SECOND_DERIVATIVE))
    jvp = staticmethod(refuse_transform(_NO_SECOND_DERIVATIVE))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Batched:
        return loop_over_batch(_AttentionBackward, info, in_dims, arguments)


class _Tangents(torch.autograd.Function):
    """Forward derivative of `operator.attention`: tangents of out and lse. Its derivatives raise."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        query_shape, key_shape, with_lse, *settings = arguments[11:]
        shapes = (query_shape, key_shape, key_shape)
        return attention_tangents(
            arguments[:3], arguments[3:11], shapes=shapes, with_lse=with_lse, settings=Settings(*settings)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    backward = staticmethod(refuse_transform(_NO_DERIVATIVE_OF_A_TANGENT))
    jvp = staticmethod(refuse_transform(_NO_DERIVATIVE_OF_A_TANGENT))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Batched:
        return loop_over_batch(_Tangents, info, in_dims, arguments)


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
    contribution = grid_tangents(Inputs(q, k, v), changes, PartialAttention(out, lse), mask, ring=ring)
    if ulysses is not None:
        contribution = partial_to_tokens(contribution, with_lse=with_lse, to=ulysses)
    return contribution.out.contiguous(), contribution.lse.contiguous()
