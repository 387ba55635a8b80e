"""Forward derivatives and higher derivatives of the custom operators of this package.

`torch.library` supports a backward for an operator, but no forward derivative. If no input requires grad, it calls the
operator below autograd: the result has no tangent, and no error is raised. Therefore operators are called through an
`autograd.Function` while inputs may have tangents. Otherwise they are called directly, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_cp.comm.stats import STATS
from lightning_cp.compat.compiler import uncompiled
from lightning_cp.compat.torch_names import forward_ad_level, torch_func_is_active

# What the vmap rule of an `autograd.Function` returns: the results, and the batch dim of each.
Batched = tuple[Tensor, int] | tuple[tuple[Tensor, ...], tuple[int, ...]]
# operator name -> (operator, adjoint): both are linear in their first argument and share the other arguments.
_ADJOINTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {}


def transforms_are_on() -> bool:
    """Return True if operators must be called through an `autograd.Function`.

    This is the case if inputs may have tangents (inside `torch.autograd.forward_ad.dual_level` or `torch.func.jvp`), or
    another transform of `torch.func` is active.

    Raises: NotImplementedError: inputs may have tangents under `torch.compile`: compiled operators have no forward
        derivative.
    """
    tangents = forward_ad_level() >= 0
    if not torch.compiler.is_compiling():
        return tangents or torch_func_is_active()
    if tangents:
        raise NotImplementedError(
            "torch.compile with forward derivatives (torch.func.jvp, torch.autograd.forward_ad) is not implemented for "
            "context-parallel models: where tangents are needed, call the model without torch.compile"
        )
    return False


def primal_of(x: Tensor) -> Tensor:
    """Return `x` without the tangent of the innermost level. The gradient passes through."""
    primal: Tensor = forward_ad.unpack_dual(x).primal  # type: ignore[no-untyped-call]
    return primal


def refuse_tangents(function: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError if one of the tensors has a tangent.

    Args: function: name of the function without a forward derivative, for the message.
    """
    if forward_ad_level() < 0:
        return
    duals = [forward_ad.unpack_dual(x) for x in tensors if x is not None]  # type: ignore[no-untyped-call]
    if any(x.tangent is not None for x in duals):
        raise NotImplementedError(
            f"{function} has no forward derivative: call it outside of torch.func.jvp and torch.autograd.forward_ad, "
            "or detach its inputs"
        )


def register_adjoint(operator: Any, adjoint: Any) -> None:
    """Register two linear operators as each other's backward, which gives derivatives of any order.

    Args: operator, adjoint: custom operators `(x, *arguments) -> Tensor` with the same arguments; may be the same one.
    """
    for this, other in ((operator, adjoint), (adjoint, operator)):
        _ADJOINTS[this._qualname] = (this, other)
        this.register_autograd(_backward_of(this), setup_context=_setup)


def call_linear(operator: Any, x: Tensor, *arguments: Any) -> Tensor:
    """Call an operator registered by `register_adjoint`.

    Ranks: those of the operator. Gradient: the adjoint. Forward derivative: the operator applied to the tangent; either
    all ranks or no rank have a tangent.
    """
    if not transforms_are_on():
        output: Tensor = operator(x, *arguments)
        return output
    result: Tensor = apply_eagerly(_Linear, x, operator._qualname, *arguments)
    return result


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments, ctx.module = inputs[1:], STATS.module


def _backward_of(operator: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with STATS.inside_module(ctx.module):
            _, adjoint = _ADJOINTS[operator._qualname]
            return call_linear(adjoint, grad, *ctx.arguments), *[None] * len(ctx.arguments)

    return backward


class _Linear(torch.autograd.Function):
    """Linear operator with an adjoint. Use: `apply(x, name, *arguments)`, with the name of the operator."""

    @staticmethod
    def forward(x: Tensor, name: str, *arguments: Any) -> Tensor:
        return _ADJOINTS[name][0](x, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.name, *arguments = inputs
        ctx.arguments, ctx.module = tuple(arguments), STATS.module

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        with STATS.inside_module(ctx.module):
            return call_linear(_ADJOINTS[ctx.name][1], grads[0], *ctx.arguments), *[None] * (1 + len(ctx.arguments))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return call_linear(_ADJOINTS[ctx.name][0], tangents[0], *ctx.arguments)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Batched:
        return loop_over_batch(_Linear, info, in_dims, arguments)


def apply_eagerly(function: Any, *arguments: Any) -> Any:
    """Apply an `autograd.Function` and exclude the functions it calls from compilation.

    A compiled model runs eagerly while it computes tangents. Dynamo would then try to compile each called function, and
    fail on some ranks only.
    """
    return uncompiled(function.apply)(*arguments)


def loop_over_batch(function: Any, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> Batched:
    """Implement the `vmap` rule of an `autograd.Function` as a loop over samples.

    Ranks: those of the function, with equal batch sizes, so that all make the same number of exchanges.
    """

    def sample(index: int) -> list[Any]:
        pairs = zip(arguments, in_dims, strict=True)
        return [x.select(dim, index) if isinstance(x, Tensor) and dim is not None else x for x, dim in pairs]

    results = [function.apply(*sample(index)) for index in range(info.batch_size)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(each) for each in zip(*results, strict=True)), (0,) * len(results[0])


def refuse_transform(message: str) -> Callable[..., NoReturn]:
    """Return a backward or jvp function that raises NotImplementedError. Args: message: the error message."""

    def raise_it(ctx: Any, *_: object) -> NoReturn:
        raise NotImplementedError(message)

    return raise_it
