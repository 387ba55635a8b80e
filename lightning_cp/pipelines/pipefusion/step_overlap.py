"""Labels of pieces: they tell whether a step can begin before the step before is complete on all stages.

The label of an element is the number of the last piece of the results that it depends on, and 0 if it depends on none.
The operators of guidance and of the scheduler carry labels from the results to the arguments of the next transformer
call. All ranks run the same operators, so they decide the same without an exchange. Between the arguments and the
blocks, the plan of the class says whether patches are mixed (`Patches.overlaps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce

import torch
from torch import Tensor

from lightning_cp.compat.torch_names import aten
from lightning_cp.nest import of_type, replace

_aten = torch.ops.aten
_MOVES = (_aten.clone, _aten.repeat, _aten.cat, _aten.stack)
_REDUCTIONS = (_aten.sum, _aten.mean, _aten.std, _aten.var, _aten.amax, _aten.amin, _aten.linalg_vector_norm)
# Operators besides elementwise ones that schedulers and guidance use. (einsum is a bmm.) Modules use others, and wait.
CARRIERS = frozenset((aten("_to_copy"), _aten.bmm, *_MOVES, *_REDUCTIONS))
_NO_PIECE = torch.iinfo(torch.int16).max


@dataclass(eq=False)
class PieceLabels:
    """The labels of all tensors that depend on results that have not arrived.

    Attributes: by_storage: for the address of a storage, the label of each of its elements, int16 on the host.
    """

    by_storage: dict[int, Tensor] = field(default_factory=dict)

    def of(self, x: Tensor) -> Tensor:
        """Return the labels of a tensor's elements, with its shape."""
        storage = x.untyped_storage()
        labels = self.by_storage.get(storage.data_ptr())
        if labels is None:
            return torch.zeros((), dtype=torch.int16).expand(x.shape)
        if len(labels) * x.element_size() != storage.nbytes():  # a view of another dtype
            return torch.full((), _NO_PIECE, dtype=torch.int16).expand(x.shape)
        return labels.as_strided(x.shape, x.stride(), x.storage_offset())

    def put(self, x: Tensor, labels: Tensor | None) -> None:
        """Set the labels of a tensor's elements. Args: labels: None: they arrive in no pieces."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.by_storage:
            self.by_storage[storage.data_ptr()] = torch.zeros(storage.nbytes() // x.element_size(), dtype=torch.int16)
        self.of(x).copy_(torch.tensor(_NO_PIECE) if labels is None else labels)

    def carry(self, buffer: Tensor, function: partial[Tensor]) -> None:
        """Set the labels of an operator's result. Args: function: one of `CARRIERS`, or an elementwise operator."""
        self.put(buffer, _carried(function, buffer.shape, self.of))

    def forget(self, computed: Iterable[Tensor]) -> None:
        """Forget the labels of tensors that have their values."""
        for x in computed:
            self.by_storage.pop(x.untyped_storage().data_ptr(), None)

    def are_within(self, arguments: Sequence[Tensor], pieces: Sequence[Tensor]) -> bool:
        """Return True if each piece of a transformer call needs the same and earlier pieces of the results only.

        Args:
            arguments: tensors that the call gets.
            pieces: for each tensor of its result, the number of the piece of each element. If there is one, it is for
                all arguments.
        """
        if len(pieces) == 1:
            pieces = [*pieces] * len(arguments)
        return len(pieces) == len(arguments) and all(
            _are_at_most(self.of(x), of_result) for x, of_result in zip(arguments, pieces, strict=True)
        )


def _are_at_most(labels: Tensor, pieces: Tensor) -> bool:
    """Compare at equal positions; along a dim of other size (channels), the largest with the smallest."""
    if labels.ndim != pieces.ndim:
        return False
    for dim, (size, of_result) in enumerate(zip(labels.shape, pieces.shape, strict=True)):
        if size != of_result:
            labels, pieces = labels.amax(dim, keepdim=True), pieces.amin(dim, keepdim=True)
    return bool((labels <= pieces).all())


def _carried(function: partial[Tensor], shape: Sequence[int], labels_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the labels of an operator's result of this shape, or labels that broadcast to it."""
    packet = function.func.overloadpacket  # type: ignore[attr-defined]
    args, kwargs = replace(Tensor, labels_of, (function.args, function.keywords))
    labels = list(of_type(Tensor, (args, kwargs)))
    if packet in _MOVES:
        return function.func(*args, **kwargs)
    if packet is _aten.bmm:
        left, right = labels
        return torch.maximum(left.amax(2, keepdim=True), right.amax(1, keepdim=True))
    if packet in _REDUCTIONS:
        (reduced,) = labels
        if reduced.ndim != len(shape):
            return reduced.amax()
        dims = [dim for dim, size in enumerate(shape) if size != reduced.shape[dim]]
        return reduced.amax(dims, keepdim=True) if dims else reduced
    return reduce(torch.maximum, labels)
