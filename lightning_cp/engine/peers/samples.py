"""Samples of the arguments of a forward, small enough to be compared between ranks in every forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_cp.comm.background import to_device
from lightning_cp.compat.torch_names import no_torch_dispatch
from lightning_cp.engine.peers.checksum import digest_ints
from lightning_cp.nest import named_leaves

SAMPLES = 4096  # elements read of each tensor, or up to twice as many
_SLOTS = 8  # tensors of an argument that are compared one by one; of more tensors, sums
_PROJECTIONS = 4

_TOLERANCE = 1e-3  # relative to the norm, as in the full comparison
_LARGEST = 1e6  # clamp: -inf or the lowest value of a dtype (in masks) would hide all other values of a sum
_NAN = 3e5  # replaces NaN
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEXABLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_INDEXABLE |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Sampler:
    """Reduces the arguments of one model's forward to a table of fixed size.

    Of each tensor, elements at equal distances are read, others in each forward until all were read. The table has
    their norm, and projections onto random weights.

    Args: names: parameter names of the forward. Their number and order must be the same on all ranks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def table(
        self, arguments: Mapping[str, Any], *, forward: int, device: torch.device
    ) -> tuple[Tensor, tuple[float, ...]]:
        """Build one row for each argument: a hash of shapes, types and integers, then tolerances, norms, projections.

        The first row holds the number of the forward.

        Args:
            arguments: arguments by name; others than `names` are ignored.
            forward: number of the forward, the same on all ranks; it decides which elements are read.
        Returns: the table, float64 [1 + len(names), any] on `device` (the host does not wait for a GPU), and the
            hashes.
        """
        structures, tensors = [float(forward)], list[tuple[Tensor, int]]()
        for row, name in enumerate(self.names, 1):
            leaves = list(compared_leaves(name, arguments.get(name)))
            kinds = [(path, _shape_and_dtype(x)) for path, x in leaves] + list(plain_values(name, arguments.get(name)))
            structures.append(_hash(kinds) if kinds else 0.0)
            readable = [x for x in (_readable(x) for _, x in leaves) if x is not None and x.numel()]
            tensors += [(x, row * _SLOTS + number % _SLOTS) for number, x in enumerate(readable)]
        tensors.sort(key=lambda pair: not pair[0].is_floating_point())
        shape = (2 + _PROJECTIONS, len(structures), _SLOTS)
        contents = torch.zeros(shape, dtype=torch.float64, device=device)
        for source in dict.fromkeys(x.device for x, _ in tensors):
            here = [(x, slot) for x, slot in tensors if x.device == source]
            contents += to_device(_digests(here, forward, len(structures) * _SLOTS), device).view(shape)
        column = torch.tensor(structures, dtype=torch.float64, device="cpu")[:, None]
        return torch.cat([to_device(column, device), *contents], 1), tuple(structures[1:])


def _digests(tensors: Sequence[tuple[Tensor, int]], forward: int, num_slots: int) -> Tensor:
    """Return the tolerance, the norm and projections of tensors on one device, added to their slots.

    Args: tensors: those with floats first.
    Returns: float64 [2 + _PROJECTIONS, num_slots].
    """
    kinds = tuple((_count(x), x.dtype, slot) for x, slot in tensors)
    weights, owners, tolerances, slots = reading_of(kinds, tensors[0][0].device)
    values = torch.cat([weights[0, :0], *(_read(x, kind[0], forward) for (x, _), kind in zip(tensors, kinds))])
    floats = values[: sum(count for count, dtype, _ in kinds if dtype.is_floating_point)]
    floats.nan_to_num_(nan=_NAN, posinf=_LARGEST, neginf=-_LARGEST).clamp_(-_LARGEST, _LARGEST)
    added = torch.cat([values.square(), (weights * values).flatten()])
    sums = added.new_zeros((1 + _PROJECTIONS) * len(tensors)).index_add_(0, owners, added).view(-1, len(tensors))
    norms = sums[:1].sqrt()
    rows = torch.cat([norms * tolerances, norms, sums[1:]])
    return rows.new_zeros(len(rows), num_slots).index_add_(1, slots, rows)


def _count(x: Tensor) -> int:
    return x.numel() // _step(x)


def _step(x: Tensor) -> int:
    return max(1, x.numel() // SAMPLES) | 1  # odd, so that it has no common period with most sizes


def _read(x: Tensor, count: int, forward: int) -> Tensor:
    """Read `count` elements at equal distances. Where they begin moves with the forward, through all elements."""
    step = _step(x)
    start = forward * 0x9E3779B1 % (x.numel() - (count - 1) * step)
    if x.is_contiguous():
        return x.view(-1)[start::step][:count]
    return torch.take(x, torch.arange(start, start + count * step, step, device=x.device))


@lru_cache(maxsize=16)
def reading_of(kinds: tuple[tuple[int, torch.dtype, int], ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return what reduces the elements read of tensors on a device.

    Args: kinds: number of elements, dtype and slot of each tensor.
    Returns: weights of the elements [_PROJECTIONS, elements]; for their squares and projections the place of the sum,
        [(1 + _PROJECTIONS) * elements]; a relative error and the slot of each tensor.
    """
    counts, dtypes, slots = zip(*kinds, strict=True)
    drawn = np.random.Generator(np.random.PCG64(0)).random((2, _PROJECTIONS, sum(counts)))
    weights = (drawn[0] + 0.5) * np.where(drawn[1] < 0.5, -1.0, 1.0)  # random sign, magnitude 0.5 to 1.5
    owners = np.repeat(np.arange(len(counts)), counts) + len(counts) * np.arange(1 + _PROJECTIONS)[:, None]
    arrays = (weights, owners.reshape(-1), np.array([_tolerance(dtype) for dtype in dtypes]), np.array(slots))
    return tuple(to_device(torch.from_numpy(x), device) for x in arrays)


def sampled_difference(by_rank: npt.NDArray[np.float64], names: Sequence[str]) -> tuple[int, str] | None:
    """Return the first rank that differs from rank 0, and a description; None if all are equal.

    Args: by_rank: the tables of all ranks, [ranks, any].
    """
    by_rank = by_rank.reshape(len(by_rank), 1 + len(names), -1)
    counts, by_rank = by_rank[:, 0, 0], by_rank[:, 1:]
    for rank, count in enumerate(counts):
        if count != counts[0]:
            return rank, f"one has called the model {int(count)} times and the other {int(counts[0])} times"
    structures, contents = by_rank[..., 0], by_rank[..., 1:].reshape(*by_rank.shape[:2], -1, _SLOTS)
    tolerances, sums = contents[:, :, :1], contents[:, :, 1:]
    unlike = structures != structures[:1]
    apart = ~(np.abs(sums - sums[:1]) <= np.maximum(tolerances, tolerances[:1])).all((-1, -2))
    differing = np.argwhere(unlike | apart)
    if not len(differing):
        return None
    rank, index = (int(x) for x in differing[0])
    if not unlike[rank, index]:
        return rank, f"the contents of {names[index]} differ"
    if 0.0 in (structures[rank, index], structures[0, index]):
        return rank, f"{names[index]} was given to one of them only"
    return rank, f"the shapes, types or whole numbers of {names[index]} differ"


def compared_leaves(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a nest, and its floats as scalar tensors, with their names."""
    for name, x in named_leaves(prefix, value):
        if isinstance(x, Tensor):
            yield name, x
        elif isinstance(x, float):
            yield name, torch.tensor(x, dtype=torch.float64, device="cpu")


def plain_values(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield all ints, bools and strings of a nest as strings (`repr`), with their names."""
    for name, x in named_leaves(prefix, value):
        if isinstance(x, (bool, int, str)):
            yield name, repr(x)


def _shape_and_dtype(x: Tensor) -> str:
    if x.layout != torch.strided:
        return f"{type(x).__name__} {x.dtype}"  # shapes of nested tensors contain symbols numbered per process
    return f"{tuple(x.shape)} {x.dtype}"


def _hash(value: object) -> float:
    """Return a 48-bit hash plus 1, which float64 represents exactly; never 0."""
    return float(1 + (digest_ints(value, 1)[0] & ((1 << 48) - 1)))


def _readable(x: Tensor) -> Tensor | None:
    """Return the elements as an ordinary real tensor; None if they are not local (DTensor, fake and meta tensors)."""
    holds_memory = type(x).__torch_dispatch__ is no_torch_dispatch
    if not holds_memory or x.layout != torch.strided or x.is_meta or x.is_quantized:
        return None
    x = x.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x if x.dtype in _INDEXABLE else x.view(_BITS[x.element_size()])


def _tolerance(dtype: torch.dtype) -> float:
    """Return how much two sums may differ and still count as equal, relative to the norm of their elements."""
    return max(_TOLERANCE, 2 * torch.finfo(dtype).eps) if dtype.is_floating_point else 1e-9  # integers are only summed
