"""Asynchronous Ulysses: exchange query, key and value one by one, each while the next one is projected.

In backward the gradients of query, key and value are exchanged together, and the backward of each projection overlaps
with the transfers that have not finished yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention.call import Lengths, Settings, exchange_lengths, four_dims, ulysses_of
from lightning_cp.attention.derivatives import call_attention
from lightning_cp.attention.ulysses import Ulysses, mask_to_heads, start_to_heads, start_to_tokens
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.comm.transforms import refuse_tangents
from lightning_cp.config import context_config
from lightning_cp.errors import PeerMismatchError, ShapeError
from lightning_cp.mesh.groups import SINGLE_RANK, MeshGroups, groups_by_name, groups_for, ring_groups

_Start = Callable[..., Callable[[], list[Tensor]]]


@dataclass(frozen=True, eq=False)
class InTransit:
    """A query, key or value in transit. Pass it to `context_parallel_attention` in place of the tensor.

    Attributes:
        shape: [batch, seq_local, heads, head_dim] of the tensor that was passed to `start_ulysses`.
        like: placeholder tensor of that shape and dtype, without data.
        lengths: number of tokens on each rank of the context group, in rank order.
        groups: `MeshGroups.name` of the process groups.
    """

    shape: torch.Size
    like: Tensor
    lengths: tuple[int, ...]
    groups: str
    _token: Tensor
    _transfer: _Transfer

    def wait(self) -> Tensor:
        """Wait for the exchange. Returns: [batch, seq_group, heads_local, head_dim], tokens of the Ulysses group."""
        received: Tensor = _Finish.apply(self._token, self._transfer)  # type: ignore[no-untyped-call]
        return received


def start_ulysses(x: Tensor, *, parallel_config: object, lengths: Sequence[int] | None = None) -> Tensor | InTransit:
    """Start the Ulysses exchange of a query, key or value; `context_parallel_attention` finishes it.

    Use it in model code to overlap a transfer with the projection of the next tensor:

        query = start_ulysses(self.to_q(x), parallel_config=config)
        key = start_ulysses(self.to_k(x), parallel_config=config)  # the query is in transit
        out = context_parallel_attention(query, key, self.to_v(x), parallel_config=config)

    Args:
        x: [batch, seq_local, heads, head_dim]; `ulysses_degree` divides heads. Do not change it in place before
            attention has returned.
        parallel_config: see `context_parallel_attention`.
        lengths: number of tokens on each rank of the context group, in rank order; saves an exchange of sizes.
    Returns: argument for `context_parallel_attention`; `x` itself with `ulysses_degree=1`.
    Ranks: all of the context group, in the same order.
    Raises:
        ShapeError: the shape or `lengths` is invalid.
        PeerMismatchError: another rank of the context group passed an invalid tensor, or one of a different batch,
            heads or head size.
        NotImplementedError: called under torch.compile, or `x` has a tangent (torch.func.jvp).
    Gradient: exact.
    """
    config = context_config(parallel_config)
    groups = SINGLE_RANK if config.mesh_shape == (1, 1) else groups_for(config)
    return x if groups.ulysses is None else _started(x, groups, None if lengths is None else list(lengths))


def _started(x: Tensor, groups: MeshGroups, lengths: list[int] | None) -> InTransit:
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "start_ulysses does not support torch.compile: pass the tensors to attention without it"
        )
    refuse_tangents("start_ulysses", x)
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    lengths_by_rank = _exchange_token_counts(x, lengths, groups)
    all_lengths = Lengths(lengths_by_rank, lengths_by_rank, "", (0,) * len(lengths_by_rank))
    to = ulysses_of(all_lengths, x.shape[2], x.shape[2], groups=groups)
    assert to is not None, "the Ulysses degree is above 1"
    transfer = _Transfer(start_to_heads, start_to_tokens, to)
    token = _Begin.apply(x, transfer)  # type: ignore[no-untyped-call]
    return InTransit(x.shape, x.detach().new_empty(()).expand(x.shape), lengths_by_rank, groups.name, token, transfer)


def attend_in_transit(
    query: Tensor | InTransit,
    key: Tensor | InTransit,
    value: Tensor | InTransit,
    mask: Tensor | None,
    settings: Settings,
    *,
    lengths: tuple[list[int], list[int]],
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Finish `context_parallel_attention` if at least one argument is in transit.

    Args: lengths: q_lengths and kv_lengths of the call; empty if unknown.
    """
    groups, arguments = groups_by_name(settings.groups), {"query": query, "key": key, "value": value}
    lengths_by_name = dict(zip(arguments, (lengths[0], lengths[1], lengths[1]), strict=True))
    for name, x in arguments.items():
        if isinstance(x, InTransit) and x.groups != settings.groups:
            raise ValueError(
                f"{name} was sent with another parallel_config: use the same one for start_ulysses and attention"
            )
        if isinstance(x, InTransit) and lengths_by_name[name] and list(x.lengths) != lengths_by_name[name]:
            raise ShapeError(
                f"{name} was sent with lengths {list(x.lengths)}, but attention got {lengths_by_name[name]}"
            )
    q, k, v = (_in_transit(x, groups, lengths_by_name[name]) for name, x in arguments.items())
    mask = four_dims(mask, k.like)
    all_lengths = exchange_lengths(
        q.like,
        k.like,
        v.like,
        mask,
        q_lengths=list(q.lengths),
        kv_lengths=list(k.lengths),
        groups=groups,
        settings=settings,
    )
    to = ulysses_of(all_lengths, q.shape[2], k.shape[2], groups=groups)
    assert to is not None, "start_ulysses returns tensors for degree 1"
    if mask is not None:
        mask = mask_to_heads(mask, to=to)
    chunks = (_chunks(all_lengths.query, groups), _chunks(all_lengths.key, groups))
    causal, scale, _, *others = settings
    options = (causal, scale, ring_groups(groups).name, *others)
    out, lse = call_attention(q.wait(), k.wait(), v.wait(), mask, None, *chunks, True, *options)
    return (_to_tokens(out, to), _to_tokens(lse, to)) if return_lse else _to_tokens(out, to)


def _in_transit(x: Tensor | InTransit, groups: MeshGroups, lengths: list[int]) -> InTransit:
    return _started(x, groups, lengths or None) if isinstance(x, Tensor) else x


def _to_tokens(x: Tensor, to: Ulysses) -> Tensor:
    """Exchange [b, s_group, h_local, ...] -> [b, s_local, h, ...], with a gradient."""
    transfer = _Transfer(start_to_tokens, start_to_heads, to)
    received: Tensor = _Finish.apply(_Begin.apply(x, transfer), transfer)  # type: ignore[no-untyped-call]
    return received


class _Transfer:
    """One exchange and its adjoint; `_Begin` and `_Finish` start and finish them.

    Args: start, start_adjoint: `start_to_heads` and `start_to_tokens`, or the reverse.
    """

    def __init__(self, start: _Start, start_adjoint: _Start, to: Ulysses) -> None:
        self._start, self._start_adjoint, self._to = start, start_adjoint, to
        self._pending: Callable[[], list[Tensor]] | None = None

    def start(self, x: Tensor, *, adjoint: bool = False) -> None:
        self._pending = (self._start_adjoint if adjoint else self._start)([x], to=self._to)

    def finish(self) -> Tensor:
        if self._pending is None:
            raise RuntimeError("this exchange was already finished: pass the result of start_ulysses to one call only")
        pending, self._pending = self._pending, None
        (received,) = pending()
        return received


class _Begin(torch.autograd.Function):
    """Start an exchange. The result is an empty tensor that links this autograd node to `_Finish`."""

    @staticmethod
    def forward(x: Tensor, transfer: _Transfer) -> Tensor:
        transfer.start(x)
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.transfer = inputs[1]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        return ctx.transfer.finish(), None


class _Finish(torch.autograd.Function):
    """Finish the exchange that `_Begin` started. Backward starts the exchange of the gradient."""

    @staticmethod
    def forward(token: Tensor, transfer: _Transfer) -> Tensor:
        return transfer.finish()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.transfer = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start(grads[0], adjoint=True)
        return grads[0].new_empty(0), None


def _exchange_token_counts(x: Tensor, lengths: list[int] | None, groups: MeshGroups) -> tuple[int, ...]:
    """Return the number of tokens on each rank, all-gathered if `lengths` is None. Raises: see `start_ulysses`."""
    error = _refusal(x, lengths, groups)
    if lengths is not None:
        if error:
            raise ShapeError(error)
        return tuple(lengths)
    assert groups.context is not None, "the Ulysses degree is above 1"
    signature = [0] * 5 if error else [1, x.shape[1], x.shape[0], *x.shape[2:]]
    signatures = all_gather_ints(signature, group=groups.context)
    if error:
        raise ShapeError(error)
    if any(other[:1] + other[2:] != signature[:1] + signature[2:] for other in signatures):
        listing = "; ".join(f"rank {rank}: {other[2:]}" for rank, other in enumerate(signatures))
        raise PeerMismatchError(
            f"ranks of one context group called start_ulysses with different shapes (batch, heads, head_dim; zeros: "
            f"the rank's tensor is invalid): {listing}"
        )
    return tuple(other[1] for other in signatures)


def _refusal(x: Tensor, lengths: list[int] | None, groups: MeshGroups) -> str:
    """Return why the tensor cannot be exchanged; "" if it can."""
    degree = groups.context_shape[1]
    if x.ndim != 4:
        return f"{tuple(x.shape)} must be [batch, seq_local, heads, head_dim]"
    if not x.shape[2] or x.shape[2] % degree:
        return f"ulysses_degree={degree} must divide the number of heads, got {x.shape[2]} in {tuple(x.shape)}"
    if lengths is not None and (len(lengths) != groups.context_size or lengths[groups.context_rank] != x.shape[1]):
        return (
            f"lengths={lengths} must hold one length for each of the {groups.context_size} ranks of the context group, "
            f"and {x.shape[1]} for this one (rank {groups.context_rank})"
        )
    return ""


def _chunks(lengths: Sequence[int], groups: MeshGroups) -> list[int]:
    rings, degree = groups.context_shape
    return [sum(lengths[i * degree : (i + 1) * degree]) for i in range(rings)]
