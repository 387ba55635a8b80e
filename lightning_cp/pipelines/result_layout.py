"""The form of a module's result: everything except the contents of its tensors."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.packet import Layout, layout_of
from lightning_cp.compat.torch_names import TreeSpec, tree_flatten, tree_unflatten
from lightning_cp.nest import of_type

_MOST_SHAPES = 256  # entries of a table; with stages, a size has one for each patch


@dataclass(frozen=True)
class Form:
    """Form of a result: its tree structure, the layout of its tensors, and its other leaves.

    Attributes:
        spec: tree structure.
        layout: shapes and dtypes of the tensors, in order.
        device: device of the tensors.
        rest: all leaves, with None in place of a tensor.
        is_tensor: for each leaf, True if it is a tensor.

    A form that another rank has sent has this rank's device of the same type.
    """

    spec: TreeSpec
    layout: Layout
    device: torch.device
    rest: list[Any]
    is_tensor: list[bool]

    def __reduce__(self) -> tuple[Any, ...]:
        return _form_of_another_rank, (self.spec, self.layout, self.device.type, self.rest, self.is_tensor)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Build a result of this form from `tensors`."""
        pieces = iter(tensors)
        leaves = [next(pieces) if here else x for here, x in zip(self.is_tensor, self.rest, strict=True)]
        return tree_unflatten(leaves, self.spec)

    def empty(self) -> list[Tensor]:
        """Allocate tensors of this form."""
        return [torch.empty(piece.shape, dtype=piece.dtype, device=self.device) for piece in self.layout]


def _form_of_another_rank(
    spec: TreeSpec, layout: Layout, device_type: str, rest: list[Any], is_tensor: list[bool]
) -> Form:
    is_cuda = device_type == "cuda"
    device = torch.device(device_type, torch.cuda.current_device()) if is_cuda else torch.device(device_type)
    return Form(spec, layout, device, rest, is_tensor)


@contextmanager
def unpickled_quietly() -> Iterator[None]:
    """Context to receive forms in: torch warns of its own tree specs when they are unpickled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
        yield


def form_and_tensors(result: Any) -> tuple[Form, list[Tensor]]:
    """Return the form and the tensors of a result. The result has at least one tensor."""
    leaves, spec = tree_flatten(result)
    is_tensor = [isinstance(x, Tensor) for x in leaves]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    rest = [None if isinstance(x, Tensor) else x for x in leaves]
    return Form(spec, layout_of(tensors), tensors[0].device, rest, is_tensor), tensors


def key_of(values: Any) -> tuple[Any, ...]:
    """Return a key that determines the form of a module's result from its arguments.

    It has the shapes and dtypes of tensors, other values, the tree structure, and the dtypes of autocast.
    """
    leaves, spec = tree_flatten(values)
    kinds = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else _plain(x) for x in leaves)
    return kinds, repr(spec), _autocast(values)


def forget_oldest(table: dict[Hashable, Any], most: int | None = None) -> None:
    """Remove the oldest entries of a table by shapes, so that a service with ever new sizes does not fill the memory.

    Args: most: number of entries to keep; None: 256.
    Ranks: those that exchange something for a new key call it at the beginning of a pipeline call, when nothing is on
        its way. Their tables have the same keys in the same order, so they remove the same ones.
    """
    for key in list(table)[: max(len(table) - (_MOST_SHAPES if most is None else most), 0)]:
        del table[key]


def _autocast(values: Any) -> tuple[Any, ...]:
    kinds = sorted({x.device.type for x in of_type(Tensor, values)})
    on = [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in on)


def _plain(value: Any) -> str:
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
