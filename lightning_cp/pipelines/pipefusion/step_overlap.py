"""Find out whether a step can begin before the step before is complete on all stages.

The operators between the two steps are those of guidance, of the scheduler and of the model before its blocks. With
them, each piece of the next transformer call must depend on the same and earlier pieces of the results only. To find
out, all other pieces are set to NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_cp.nest import of_type
from lightning_cp.pipelines.lazy_tensor import Deferred, LazyTensor, compute
from lightning_cp.pipelines.pipefusion.result_pieces import Positions
from lightning_cp.pipelines.pipefusion.result_transfers import CallResult

# Computes the start of the model for the forward of a piece: see `PatchRunner`.
ComputeStart = Callable[[int], "list[Tensor] | None"]


def have_pieces(results: Sequence[CallResult], later: Sequence[Deferred], count: int) -> bool:
    """Return True if all results arrive in `count` pieces, and all tensors computed from them can hold NaN."""
    tensors = [*(x for result in results for x in result.tensors), *(buffer for buffer, _ in later)]
    return all(len(x.pieces) == count for x in results) and all(x.is_floating_point() for x in tensors)


def describe(lazy: Sequence[LazyTensor], results: Sequence[CallResult], later: Sequence[Deferred]) -> Hashable:
    """Return how lazy tensors are computed from results, without the values of tensors and real numbers."""
    known = [*(x for result in results for x in result.tensors), *(buffer for buffer, _ in later)]
    numbers = {x.untyped_storage().data_ptr(): i for i, x in enumerate(known)}
    keys = tuple(result.key for result in results)
    return keys, *(_describe(x.buffer, numbers) for x in lazy), *(_describe_operator(x, numbers) for x in later)


def _describe_operator(deferred: Deferred, numbers: Mapping[int, int]) -> str:
    buffer, function = deferred
    arguments = of_type(object, (function.args, function.keywords))
    return repr([str(function.func), *(_describe(x, numbers) for x in (buffer, *arguments))])


def _describe(value: object, numbers: Mapping[int, int]) -> str:
    """Describe an argument; a view of a tensor in `numbers` (by address of the storage) with its place in it."""
    if isinstance(value, Tensor):
        place = (numbers.get(value.untyped_storage().data_ptr()), value.stride(), value.storage_offset())
        return repr((tuple(value.shape), place))
    return "float" if isinstance(value, float) else repr(value)


def is_independent(
    results: Sequence[CallResult],
    later: Sequence[Deferred],
    pieces: Sequence[Positions],
    compute_start: ComputeStart,
    *,
    is_first: bool,
) -> bool:
    """Return True if this stage needs only what it knows when it computes a piece, for each piece of the next call.

    Args:
        results: complete results of the step before. later: operators deferred since then, in order.
        pieces: positions of the pieces of the next call's result.
        is_first: this is the first stage, which knows the same and earlier pieces; other stages know none.
    """
    complete = [[x.clone() for x in result.tensors] for result in results]
    is_known = []
    for number, positions in enumerate(pieces):
        for result in results:
            _hide(result, number + 1 if is_first else 0)
        compute(later)
        tensors = compute_start(number)
        is_known.append(tensors is not None and not _has_nan(tensors, positions))
        for result, values in zip(results, complete, strict=True):
            for buffer, x in zip(result.tensors, values, strict=True):
                buffer.copy_(x)
    compute(later)
    return all(is_known)


def _hide(result: CallResult, start: int) -> None:
    """Replace the pieces from number `start` on by NaN."""
    for positions in result.pieces[start:]:
        for x, p in zip(result.tensors, positions, strict=True):
            x.view(-1)[p] = torch.nan


def _has_nan(tensors: Sequence[Tensor], positions: Positions) -> bool:
    """Return True if an element of a piece is NaN. Args: tensors: the whole result, the piece on its own, or none."""
    if sum(map(len, positions)) == sum(x.numel() for x in tensors):
        return any(bool(x.isnan().any()) for x in tensors)
    return any(bool(x.flatten()[p].isnan().any()) for x, p in zip(tensors, positions, strict=bool(tensors)))
