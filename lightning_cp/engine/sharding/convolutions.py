"""Convolutions: those before the blocks embed only this rank's patches, those between rows exchange a halo."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial, partialmethod
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.halo import halo_exchange
from lightning_cp.comm.shards import gather_shards, sizes_in
from lightning_cp.comm.transforms import transforms_are_on
from lightning_cp.engine.forwards import has_dropout, own_function
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.model_plan import Embedding, Halo
from lightning_cp.engine.paths import class_of, without_adapters
from lightning_cp.engine.session import Session
from lightning_cp.errors import PlanError
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.nest import replace

_LOG = logging.getLogger(__name__)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Functions and attributes of tensors: those that only move values, and those that need the shape or the type only.
_VIEWS = {"contiguous", "flatten", "movedim", "permute", "reshape", "swapaxes", "transpose", "unflatten", "view"}
_OF_SHAPE = {"__len__", "dim", "is_contiguous", "ndim", "numel", "shape", "size", "stride"}
_OF_TYPE = {"device", "dtype", "element_size", "is_cuda", "is_floating_point", "requires_grad"}
_OPERATORS = (
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "pow"),
    *("rpow", "mod", "floordiv", "matmul", "rmatmul", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "and", "or"),
    *("invert", "getitem", "setitem", "len", "iter", "contains", "bool", "float"),
)
_CHANGES = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "register_hook", "retain_grad"}


class LocalTokens:
    """An embedding [b, tokens, c] of which this rank holds its own tokens, between a convolution and the first block.

    It is no Tensor, so autograd sees the tokens only. Functions that move values change `form`, and the first block
    takes the tokens (`own`) if they are in their order then. Any other function gets the whole tensor.

    Attributes:
        tokens: this rank's tokens [b, tokens of this rank, c].
        sizes: number of tokens of each rank.
        form: a tensor without memory, with shape and strides of the whole tensor after these functions.
    """

    def __init__(self, tokens: Tensor, sizes: Sequence[int], groups: MeshGroups, form: Tensor | None = None) -> None:
        self.tokens, self.sizes, self.groups = tokens, tuple(sizes), groups
        self.form = torch.empty(self._shape, device="meta") if form is None else form

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.tokens.shape[0], sum(self.sizes), self.tokens.shape[2])

    def own(self, dim: int, sizes: Sequence[int]) -> Tensor | None:
        """Return this rank's tokens, if they are divided along `dim` in `sizes`; otherwise None."""
        is_natural = self.form.shape == self._shape and self.form.is_contiguous()
        return self._differentiable() if is_natural and (dim, tuple(sizes)) == (1, self.sizes) else None

    def whole(self, reason: str) -> Tensor:
        """Gather the tokens, and log why. Ranks: all of the context group. Gradient: reduce-scatter (sum)."""
        note_once(f"an embedding is gathered early, because of {reason}")
        x, form = gather_shards(self._differentiable(), 1, list(self.sizes), self.groups.name), self.form
        return x.as_strided(form.shape, form.stride(), form.storage_offset())

    def to(self, *args: Any, **kwargs: Any) -> LocalTokens:
        """Return it with another dtype or device."""
        return LocalTokens(self.tokens.to(*args, **kwargs), self.sizes, self.groups, self.form)

    def _differentiable(self) -> Tensor:
        if self.tokens.requires_grad and not torch.is_grad_enabled():
            raise PlanError(
                "an embedding on shards is used without gradients, in torch.no_grad or in a torch.autograd.Function, "
                "so its gradient would be lost: leave the convolution out of the plan's embeddings"
            )
        return self.tokens

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs, x = getattr(func, "__name__", ""), kwargs or {}, args[0] if args else None
        if isinstance(x, cls):
            if name in _CHANGES or (name.endswith("_") and not name.endswith("__")):
                raise PlanError(
                    f"{name} would change an embedding on shards: use a function that returns a new tensor, or leave "
                    "the convolution out of the plan's embeddings"
                )
            form = func(x.form, *args[1:], **kwargs) if name in _VIEWS | _OF_SHAPE else None
            if name in _OF_SHAPE:
                return form
            if form is not None and form.untyped_storage() is x.form.untyped_storage():  # else it has copied values
                return cls(x.tokens, x.sizes, x.groups, form)
        return func(*whole_embeddings(args, name), **whole_embeddings(kwargs, name))

    def __getattr__(self, name: str) -> Any:
        if name in _OF_SHAPE or name in _OF_TYPE:
            return getattr(self.form if name in _OF_SHAPE else self.tokens, name)
        is_method = callable(getattr(Tensor, name))
        return partial(self._call, name) if is_method else getattr(self.whole(name), name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(getattr(Tensor, name), (), (self, *args), kwargs)


for _name in _OPERATORS:  # Python looks for them in the class only
    setattr(LocalTokens, f"__{_name}__", partialmethod(LocalTokens._call, f"__{_name}__"))


def whole_embeddings(value: Any, reason: str) -> Any:
    """Gather the embeddings on shards in a nest; see `LocalTokens.whole`."""
    return replace(LocalTokens, lambda x: x.whole(reason), value)


@cache
def note_once(message: str) -> None:
    """Log a message, once in this process."""
    _LOG.info(message)


@dataclass(eq=False)
class EmbeddingHook(EngineHook):
    """Hook around a convolution: it gets this rank's patches, and its output becomes `LocalTokens`.

    The convolution gets all patches if code of the user may need them: hooks, a subclass or a forward of its own,
    dropout in an adapter (all ranks draw the same random numbers), or other strides or padding. So it does with one
    rank, with patches (PipeFusion), in compiled code and in function transforms.

    Gradient: that of an embedding of all patches that is split afterwards. Ranks: all of the context group.

    Attributes:
        grid: number of patches in each dim, while the convolution embeds this rank's patches; otherwise None.
        sizes: number of patches of each rank, at the same time.
    """

    session: Session
    rule: Embedding
    grid: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.grid = None
        call, x = self.session.call, args[0] if args else None
        if call is None or call.groups.context is None or call.evaluation is not None or not isinstance(x, Tensor):
            return args, kwargs
        if torch.compiler.is_compiling() or transforms_are_on():
            return args, kwargs
        layer: Any = without_adapters(module)
        if not _is_by_patch(layer) or not _is_alone(module):
            note_once(f"{self.rule.path} embeds all patches on each rank: it has hooks, dropout or code of its own")
            return args, kwargs
        patch, modality = layer.kernel_size, self.rule.modality
        if x.ndim != len(patch) + 2:
            return args, kwargs
        grid = tuple(n // k for n, k in zip(x.shape[2:], patch, strict=True))
        sizes = call.sizes_of(modality) if modality in call.lengths else tuple(sizes_in(call.groups, prod(grid)))
        if sum(sizes) != prod(grid) or min(sizes) == 0:
            return args, kwargs
        call.peers.start()  # before any gather: with unequal inputs it would hang
        self.grid, self.sizes, rank = grid, sizes, call.groups.context_rank
        own = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return (own_patches(x, patch, grid, own), *args[1:]), kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        grid, self.grid = self.grid, None
        if grid is None:
            return output
        tokens = output.flatten(2).transpose(1, 2).contiguous()
        return LocalTokens(tokens, self.sizes, self.session.current().groups).transpose(1, 2).unflatten(2, grid)


def _is_alone(module: nn.Module) -> bool:
    """Return True if no other hook sees the shards, and nothing inside of the module drops values at random."""
    hooks = [hook for x in module.modules() for name in _HOOKS for hook in getattr(x, name).values()]
    are_ours = all(isinstance(getattr(hook, "__self__", None), EngineHook) for hook in hooks)
    return are_ours and not has_dropout(module)


def _is_by_patch(layer: nn.Module) -> bool:
    """Return True if a layer is a convolution of torch that computes each patch alone."""
    kind: Any = class_of(layer)
    if kind not in _CONVOLUTIONS or own_function(layer) is not kind.forward:
        return False
    assert isinstance(layer, _CONVOLUTIONS), "its class is one of them"
    is_padded = layer.padding != "valid" and any(n != 0 for n in layer.padding)
    return layer.kernel_size == layer.stride and not is_padded and all(n == 1 for n in layer.dilation)


def own_patches(x: Tensor, patch: tuple[int, ...], grid: tuple[int, ...], own: range) -> Tensor:
    """Return some patches of an input [b, c, *sizes] as an input of these patches only, [b, c, n * p0, p1, ...].

    Args:
        patch: size of a patch in each dim after the channels.
        grid: number of patches in each of these dims. A rest of the input that fills no patch is left out.
        own: numbers of the patches to return. They are counted with the last dim innermost.
    """
    dims, row = len(patch), prod(grid[1:])
    first, last = own.start // row, -(-own.stop // row)  # rows of the first dim with these patches
    x = x.narrow(2, first * patch[0], (last - first) * patch[0])
    counts = (last - first, *grid[1:])
    for dim in reversed(range(dims)):
        count, size = counts[dim], patch[dim]
        x = torch.unflatten(x.narrow(dim + 2, 0, count * size), dim + 2, (count, size))
    x = x.permute(0, 1, *range(2, 2 * dims + 2, 2), *range(3, 2 * dims + 3, 2)).flatten(2, dims + 1)
    return x.narrow(2, own.start - first * row, len(own)).flatten(2, 3)


@dataclass(eq=False)
class HaloHook(EngineHook):
    """Hook around a convolution: adds a halo of the neighbouring ranks' rows to its input.

    The convolution's zero padding takes effect only at the two ends of the sequence.

    Gradient: exact; gradients of halo rows are sent back to the rows' ranks. Ranks: all of the context group.
    """

    session: Session
    rule: Halo

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        call, rule = self.session.current(), self.rule
        (_, *sizes, _), x = call.row_division(rule.modality), args[0]
        if not isinstance(x, Tensor) or x.shape[rule.dim] != sizes[call.groups.context_rank]:
            raise PlanError(f"{rule.path} got {tuple(x.shape)}, not this rank's rows {sizes} in dim {rule.dim}")
        extended = halo_exchange(x, rule.dim, sizes, rule.reach, call.groups.name)
        if call.evaluation is not None:
            extended = call.evaluation.extend_rows(
                x, extended, dim=rule.dim, reach=rule.reach, by_rank=self._rows(), total=call.rows[rule.modality]
            )
        return (extended, *args[1:]), kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        rows = self._rows()[self.session.current().groups.context_rank]
        return output.narrow(self.rule.dim, min(self.rule.reach, rows.start) if rows else 0, len(rows))

    def _rows(self) -> list[range]:
        call, rows = self.session.current(), []
        start, *sizes, _ = call.row_division(self.rule.modality)
        for size in sizes:
            rows.append(range(start, start + size))
            start += size
        return rows
