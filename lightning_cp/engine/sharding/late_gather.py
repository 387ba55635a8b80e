"""Leave out the gather of a tensor: keep this rank's tokens until something needs all values.

After its last gather, a model usually only moves values: it joins patches to pictures. Between the embedding of the
patches and the first block, it moves them, too. A `LateGather` has the shape of the whole tensor, but holds only this
rank's tokens. It records the functions that move values, and those that change each value alone, such as a cast.
`sample_means` computes a loss on the tokens of an output, and the blocks take those of an embedding (`own_tokens`). Any
other function gathers the tensor first, so it gets all values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.shards import gather_shards
from lightning_cp.comm.transforms import transforms_are_on
from lightning_cp.compat.torch_names import make_wrapper_subclass
from lightning_cp.engine.session import Call, Session
from lightning_cp.mesh.groups import MeshGroups, groups_by_name
from lightning_cp.nest import of_type, replace

_LOG = logging.getLogger(__name__)
# Functions that move values, by name.
_MOVES = {
    *("__getitem__", "cat", "chunk", "clone", "contiguous", "einsum", "flatten", "moveaxis", "movedim", "narrow"),
    *("permute", "reshape", "select", "split", "split_with_sizes", "squeeze", "stack", "swapaxes", "swapdims", "t"),
    *("tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view"),
}
# Those that need only the shape of a second tensor.
_LIKE = {"view_as", "reshape_as"}
# Functions that change each value alone.
_CASTS = {"to", "type_as", "float", "double", "half", "bfloat16"}
_SCALINGS = {"neg", "negative", "__neg__", "mul", "multiply", "__mul__", "__rmul__", "div", "divide", "__truediv__"}
# What does not depend on values: `detach` and `requires_grad` are for reentrant checkpoints.
_METADATA = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "element_size", "is_floating_point"),
    *("is_complex", "is_contiguous", "is_inference", "get_device", "register_hook", "storage_offset"),
    *("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "grad_fn", "is_cuda", "is_meta"),
    *("_base", "_version", "_backward_hooks", "grad", "requires_grad_", "detach"),
}


@dataclass(frozen=True)
class _Tokens:
    """This rank's tokens.

    Attributes: values: without gradient. dim, sizes, groups: see `gather_shards`. form: that of all ranks' tokens.
    """

    values: Tensor
    dim: int
    sizes: tuple[int, ...]
    groups: str
    form: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of all ranks' tokens."""
        return self.form.shape

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens of a tensor in the order of the gather."""
        groups = groups_by_name(self.groups)
        own = torch.split(whole, list(self.sizes), self.dim)[groups.context_rank :: groups.context_size]
        return torch.cat(own, self.dim)


# A function of each value alone, and its arguments after the tensor.
_Pointwise = tuple[Callable[..., Tensor], tuple[Any, ...]]


class LateGather(Tensor):
    """A whole tensor of which each rank of a context group holds only its own tokens.

    Attributes:
        tokens: this rank's tokens, before the gather.
        form: a tensor on the meta device with shape, strides and dtype of the whole tensor.
        moved: moves gathered tokens, or any values in their order, to their places in the whole tensor.
        history: what `moved` does, as text.
        pointwise: functions of each value that were called since, in order. They are not yet applied to `tokens`.
    """

    tokens: _Tokens
    form: Tensor
    moved: Callable[[Tensor], Tensor]
    history: str
    pointwise: tuple[_Pointwise, ...]

    @staticmethod
    def __new__(
        cls,
        tokens: _Tokens,
        form: Tensor,
        moved: Callable[[Tensor], Tensor],
        history: str = "",
        pointwise: tuple[_Pointwise, ...] = (),
    ) -> LateGather:
        tensor: LateGather = make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), dtype=form.dtype, device=tokens.values.device
        )
        tensor.tokens, tensor.form, tensor.moved = tokens, form, moved
        tensor.history, tensor.pointwise = history, pointwise
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or getattr(func, "__self__", None) is Tensor.requires_grad:
            name = func.__self__.__name__
        if name in _METADATA or _is_backward(func, args):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if _changes(name, args, kwargs):
            raise NotImplementedError(
                f"{name} would change a tensor that is not gathered: use a function that returns a new tensor. Or "
                "compute the loss of a whole output, outside of loss_on_shards(), and leave an embedding out of the "
                "plan's embeddings"
            )
        result = _deferred(func, name, args, kwargs)
        if result is not None:
            return result
        note_gather(name)
        args, kwargs = replace(LateGather, whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Add gradients, for a tensor that is used twice, and find NaN in them, for autograd's anomaly detection."""
        if func is torch.ops.aten.isnan.default:
            return torch.isnan(args[0].tokens.values)
        if func is torch.ops.aten.add.Tensor and all(isinstance(x, LateGather) for x in args):
            return _gradient(args[0].form, args[0].tokens, args[0].tokens.values + args[1].tokens.values)
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            x = args[0]
            return LateGather(x.tokens, x.form, x.moved, x.history, x.pointwise)
        raise NotImplementedError(f"{func} of a tensor that is not gathered: call `whole` on it first")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LateGather(shape={tuple(self.shape)}, tokens={tuple(self.tokens.values.shape)})"


def gather_output(x: Tensor, dim: int, sizes: Sequence[int], call: Call, *, late: bool) -> Tensor:
    """Gather this rank's shard `x` of an output, or return a `LateGather` of it.

    The shard is gathered at once if there is nothing to gain (one rank, patches), in compiled code, and under function
    transforms.

    Args:
        dim, sizes: see `gather_shards`.
        call: the forward that returns the output.
        late: return a `LateGather` if possible.
    """
    if late and can_be_late(call):
        return gather_late(x, dim, sizes, call.groups)
    return gather_shards(x, dim, list(sizes), call.groups.name)


def can_be_late(call: Call) -> bool:
    """Return False if a `LateGather` saves nothing (one rank, patches), in compiled code, and in transforms."""
    is_parallel = call.groups.context is not None and call.evaluation is None
    return is_parallel and not torch.compiler.is_compiling() and not transforms_are_on()


def gather_late(x: Tensor, dim: int, sizes: Sequence[int], groups: MeshGroups) -> Tensor:
    """Return a `LateGather` of this rank's shard `x`. Args: dim, sizes: see `gather_shards`."""
    result: Tensor = _Enter.apply(x, dim, tuple(sizes), groups.name)  # type: ignore[no-untyped-call]
    return result


def _is_same_view(x: Tensor, y: Tensor) -> bool:
    """Return True if the moves from `y` to `x` were views that leave each value at its place."""
    if x.shape != y.shape or x.untyped_storage() is not y.untyped_storage():
        return False
    strides = zip(x.shape, x.stride(), y.stride(), strict=True)
    return x.storage_offset() == y.storage_offset() and all(a == b for n, a, b in strides if n > 1)


def own_tokens(x: Tensor, dim: int, parts: Sequence[Sequence[int]]) -> Tensor | None:
    """Return this rank's shard of a `LateGather`; None for other tensors, and if moves have changed its order.

    Args: dim: dim of the tokens. parts: see `Call.parts`, for each modality along this dim.
    """
    if not isinstance(x, LateGather):
        return None
    tokens = x.tokens
    if (dim, tokens.sizes) == (tokens.dim, tuple(parts[0][1:-1])) and _is_same_view(x.form, tokens.form):
        return tokens_of(x)
    note_gather("the order of its tokens")
    return None


@contextmanager
def keeping_shards(sessions: Iterable[Session], *, on: bool = True) -> Iterator[None]:
    """Leave out the gather of outputs in this context: models return `LateGather`s where their plans gather."""
    before = [(session, session.keeps_shards) for session in sessions]
    try:
        for session, _ in before:
            session.keeps_shards = on
        yield
    finally:
        for session, value in before:
            session.keeps_shards = value


def whole(x: Tensor) -> Tensor:
    """Return a tensor with all of its values. Ranks: all of the context group. Gradient: reduce-scatter (sum)."""
    if not isinstance(x, LateGather):
        return x
    tokens = x.tokens
    return _changed(x.moved(gather_shards(_raw_tokens(x), tokens.dim, list(tokens.sizes), tokens.groups)), x.pointwise)


def note_gather(name: str) -> None:
    """Log, once, why a tensor is gathered early. Args: name: name of the function that needs all values."""
    note_once(f"a tensor is gathered early, because of {name}")


def note_once(message: str) -> None:
    """Log a message, once in this process."""
    if message not in _NOTED:
        _NOTED.add(message)
        _LOG.info(message)


_NOTED: set[str] = set()


def _changes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a function changes an output in place."""
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))
    is_first = bool(args) and isinstance(args[0], LateGather)
    return (in_place and is_first) or any(True for _ in of_type(LateGather, kwargs.get("out")))


def _is_backward(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True for the call by which a reentrant checkpoint passes on gradients of tokens."""
    return func is torch.autograd.backward and all(isinstance(x, LateGather) for x in of_type(Tensor, args))


def _deferred(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function as a `LateGather`; None if the function needs all values."""
    late, tensors = list(of_type(LateGather, (args, kwargs))), list(of_type(Tensor, (args, kwargs)))
    first = late[0]
    if tensors[0] is not first:
        return None
    if name in _CASTS and len(late) == 1:
        cast = func(torch.empty(0, dtype=first.dtype, device=first.device), *args[1:], **kwargs)
        return _cast(first, cast.dtype) if cast.device == first.device else None
    if len(tensors) > len(late):
        return _move(func, late, args, kwargs) if name in _LIKE and len(late) == 1 else None
    if name in _SCALINGS and len(late) == 1 and not kwargs and all(isinstance(x, (int, float)) for x in args[1:]):
        form = torch.empty_like(first.form)
        return _derived(first, form, first.moved, first.history, (*first.pointwise, (func, args[1:])), late)
    return _move(func, late, args, kwargs) if name in _MOVES | _LIKE and _are_parts(late) else None


def _cast(x: LateGather, dtype: torch.dtype) -> LateGather:
    changes = x.pointwise if dtype == x.dtype else (*x.pointwise, (_to, (dtype,)))
    return _derived(x, x.form.to(dtype), x.moved, x.history, changes, [x])


def _are_parts(late: Sequence[LateGather]) -> bool:
    """Return True if all tensors were made of the same tokens, with the same functions of each value."""
    first = late[0]
    return all(x.tokens is first.tokens and x.pointwise == first.pointwise for x in late)


def _move(func: Any, late: Sequence[LateGather], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a function that moves values. Returns: None if it casts, or sums values (einsum)."""
    if func is torch.einsum and len(late) > 1:  # a product
        return None
    forms = func(*replace(LateGather, _form, args), **replace(LateGather, _form, kwargs))
    first = late[0]
    if isinstance(forms, Tensor) and (
        forms.dtype != first.dtype or (func is torch.einsum and forms.numel() < first.numel())
    ):
        return None
    moves, shown = replace(LateGather, lambda x: x.moved, (args, kwargs)), replace(Tensor, _shown, (args, kwargs))

    def one(form: Tensor, index: int | None) -> LateGather:
        history = f"{func.__name__}{shown}[{index}]"
        return _derived(first, form, partial(_moved, func, moves, index), history, first.pointwise, late)

    if isinstance(forms, Tensor):
        return one(forms, None)
    return type(forms)(one(form, i) for i, form in enumerate(forms))


def _derived(
    first: LateGather,
    form: Tensor,
    moved: Callable[[Tensor], Tensor],
    history: str,
    pointwise: tuple[_Pointwise, ...],
    late: Sequence[LateGather],
) -> LateGather:
    """Return the `LateGather` that a function makes of others. Args: late: these. first: the first of them."""
    result: LateGather = _Derive.apply((first.tokens, form, moved, history, pointwise), *late)  # type: ignore[no-untyped-call]
    return result


def _moved(func: Any, arguments: Any, index: int | None, x: Tensor) -> Tensor:
    """Move values as a function did. Args: arguments: those of the function; tensors are replaced by their `moved`."""
    args, kwargs = replace(partial, lambda moved: moved(x), arguments)
    result = func(*args, **kwargs)
    moved: Tensor = result if index is None else result[index]
    return moved


def _shown(x: Tensor) -> str:
    return x.history if isinstance(x, LateGather) else str(tuple(x.shape))


def _form(x: LateGather) -> Tensor:
    return x.form


def _changed(x: Tensor, pointwise: Sequence[_Pointwise]) -> Tensor:
    for func, args in pointwise:
        x = func(x, *args)
    return x


def tokens_of(x: LateGather) -> Tensor:
    """Return this rank's tokens with their gradient, after the functions of each value that were called."""
    return _changed(_raw_tokens(x), x.pointwise)


def _raw_tokens(x: LateGather) -> Tensor:
    result: Tensor = _Leave.apply(x)  # type: ignore[no-untyped-call]
    return result


def _gradient(form: Tensor, tokens: _Tokens, values: Tensor) -> LateGather:
    """Return the gradient with respect to a tensor of this form, which holds that with respect to its tokens."""
    return LateGather(changed(tokens, values=values), form, _SAME)


def _values(gradient: Tensor) -> Tensor:
    """Return the values of a gradient of tokens, which a hook may have scaled."""
    if not isinstance(gradient, LateGather):
        raise NotImplementedError(
            "a tensor that is not gathered got the gradient of the whole tensor, from a hook or from a "
            "torch.autograd.Function: compute the loss of the whole output, outside of loss_on_shards()"
        )
    return _changed(gradient.tokens.values, gradient.pointwise)


class _Enter(torch.autograd.Function):
    """Tokens -> `LateGather`. Gradients between the functions are those of the tokens, in the form of whole tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: tuple[int, ...], groups: str) -> LateGather:
        ctx.set_materialize_grads(False)
        shape = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
        form = torch.empty(shape, dtype=x.dtype, device="meta")
        return LateGather(_Tokens(x.detach(), dim, sizes, groups, form), form, _SAME)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None if grads[0] is None else _values(grads[0]), None, None, None


class _Derive(torch.autograd.Function):
    """`LateGather`s -> one that is made of them. Apply: the arguments of the new one, and the others."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *late: LateGather) -> LateGather:
        ctx.set_materialize_grads(False)  # only one of the tensors passes on a gradient, which is of all tokens
        ctx.forms = [x.form for x in late]
        return LateGather(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rest = [None] * (len(ctx.forms) - 1)
        if grads[0] is None:
            return None, None, *rest
        values = _values(grads[0])
        return None, _gradient(ctx.forms[0], grads[0].tokens, values), *rest


class _Leave(torch.autograd.Function):
    """`LateGather` -> tokens."""

    @staticmethod
    def forward(ctx: Any, x: LateGather) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.form, ctx.tokens = x.form, x.tokens
        return x.tokens.values.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None if grads[0] is None else _gradient(ctx.form, ctx.tokens, grads[0])


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _same(x: Tensor) -> Tensor:
    return x


_SAME = partial(_same)  # `_moved` finds what moves the values of arguments by the type `partial`
