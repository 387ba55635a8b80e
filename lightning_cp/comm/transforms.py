"""Forward derivatives, and derivatives of derivatives, of the operators of this package.

`torch.library` gives an operator a backward, but no forward derivative: where no input requires grad, it calls the
operator below autograd, and the result has no tangent. A tangent is then 0 without an error. So the functions that call
an operator go through an `autograd.Function` while a forward derivative may be under way. Otherwise they call the
operator itself, at no cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_cp.comm.stats import STATS

# (operator, its adjoint), by the operator's name: both linear in their first argument, with the same other arguments.
_ADJOINTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {}


def transforms_are_on() -> bool:
    """Whether an operator must be called through an `autograd.Function`: its inputs may carry tangents (within
    `torch.autograd.forward_ad.dual_level` or `torch.func.jvp`), or another transform of `torch.func` is under way.

    Raises: NotImplementedError: inputs may carry tangents while `torch.compile` traces, since compiled operators have
        no forward derivative.
    """
    tangents = forward_ad._current_level >= 0
    if not torch.compiler.is_compiling():
        return tangents or torch._C._are_functorch_transforms_active()
    if tangents:
        raise NotImplementedError(
            "torch.compile with forward derivatives (torch.func.jvp, torch.autograd.forward_ad) is not implemented for "
            "context-parallel models: call the model that is not compiled where tangents are needed"
        )
    return False


def primal_of(x: Tensor) -> Tensor:
    """`x` without the tangent of the innermost level. Gradient: passes through."""
    primal: Tensor = forward_ad.unpack_dual(x).primal  # type: ignore[no-untyped-call]
    return primal


def refuse_tangents(what: str, *tensors: Tensor | None) -> None:
    """Raise for what has no forward derivative. Raises: NotImplementedError: one of the tensors has a tangent."""
    if forward_ad._current_level < 0:
        return
    duals = [forward_ad.unpack_dual(x) for x in tensors if x is not None]  # type: ignore[no-untyped-call]
    if any(x.tangent is not None for x in duals):
        raise NotImplementedError(
            f"{what} has no forward derivative: call it outside of torch.func.jvp and torch.autograd.forward_ad, or "
            "detach its inputs"
        )


def register_adjoint(operator: Any, adjoint: Any) -> None:
    """Make two linear operators each other's derivative, of any order.

    Args: operator, adjoint: custom operators `(x, *arguments) -> Tensor` with the same arguments; they may be one.
    """
    for this, other in ((operator, adjoint), (adjoint, operator)):
        _ADJOINTS[this._qualname] = (this, other)
        this.register_autograd(_backward_of(this), setup_context=_setup)


def call_linear(operator: Any, x: Tensor, *arguments: Any) -> Tensor:
    """Call an operator that has an adjoint.

    Ranks: those of the operator. Forward derivative: the operator, on the tangent; ranks that exchange must agree
    whether there is one. Gradient: the adjoint.
    """
    if not transforms_are_on():
        found: Tensor = operator(x, *arguments)
        return found
    result: Tensor = apply_eagerly(_Linear, x, operator._qualname, *arguments)
    return result


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments, ctx.module = inputs[1:], STATS.module


def _backward_of(operator: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with STATS.again_in(ctx.module):
            _, adjoint = _ADJOINTS[operator._qualname]
            return call_linear(adjoint, grad, *ctx.arguments), *[None] * len(ctx.arguments)

    return backward


class _Linear(torch.autograd.Function):
    """An operator with an adjoint: `apply(x, name, *arguments)`."""

    @staticmethod
    def forward(x: Tensor, name: str, *arguments: Any) -> Tensor:
        return _ADJOINTS[name][0](x, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.name, *arguments = inputs
        ctx.arguments, ctx.module = tuple(arguments), STATS.module

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with STATS.again_in(ctx.module):
            return call_linear(_ADJOINTS[ctx.name][1], grads[0], *ctx.arguments), *[None] * (1 + len(ctx.arguments))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return call_linear(_ADJOINTS[ctx.name][0], tangents[0], *ctx.arguments)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return loop_over_batch(_Linear, info, in_dims, arguments)


def apply_eagerly(function: Any, *arguments: Any) -> Any:
    """Apply an `autograd.Function` without compiling what it calls.

    A compiled model runs eager code where it computes tangents. Dynamo would try to compile each function below, and
    fail, on some ranks only.
    """
    return uncompiled(function.apply)(*arguments)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which dynamo leaves alone, also where it runs frame by frame what it could not trace."""
    if "torch._dynamo" not in sys.modules:  # not imported for this: it takes seconds
        return function
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def loop_over_batch(function: Any, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """Apply an `autograd.Function` to one sample of `torch.func.vmap` after another, as its `vmap` rule.

    Ranks: those of the function; with equal batches, they exchange as often.
    """

    def sample(index: int) -> list[Any]:
        pairs = zip(arguments, in_dims, strict=True)
        return [x.select(dim, index) if isinstance(x, Tensor) and dim is not None else x for x, dim in pairs]

    found = [function.apply(*sample(index)) for index in range(info.batch_size)]
    if isinstance(found[0], Tensor):
        return torch.stack(found), 0
    return tuple(torch.stack(each) for each in zip(*found, strict=True)), (0,) * len(found[0])


def refuse(what: str) -> Callable[..., NoReturn]:
    """A backward or a forward derivative that is not there. Args: what: begins the error's sentence."""

    def raise_it(ctx: Any, *_: object) -> NoReturn:
        raise NotImplementedError(what)

    return raise_it
