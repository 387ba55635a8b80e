"""Samples of the arguments of a forward, small enough to be compared between ranks in every forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_cp.comm.to_device import to_device
from lightning_cp.compat.torch_names import no_torch_dispatch
from lightning_cp.engine.peers.checksum import digest_ints
from lightning_cp.nest import named_leaves

SAMPLES = 4096  # elements read of each argument
BUCKETS = 32  # number of sums for each argument

_TOLERANCE = 1e-3  # relative error of a single value, as in the full comparison
_TOLERANCE_OF_SUMS = 5e-3  # thousands of sums are compared: avoid false alarms by chance
_LARGEST = 1e6  # clamp: -inf or the lowest value of a dtype (in masks) would hide all other values of a sum
_NAN = 3e5  # replaces NaN
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEXABLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_INDEXABLE |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Sampler:
    """Reduces the arguments of one model's forward to a table of fixed size.

    At most `SAMPLES` elements of each argument are read. A larger argument is divided into `SAMPLES` equal intervals,
    and one random element of each interval is read, another one in each forward. The elements are added up, with random
    weights, to `BUCKETS` sums.

    Args: names: parameter names of the forward. Their number and order must be the same on all ranks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def table(
        self, arguments: Mapping[str, Any], *, forward: int, device: torch.device
    ) -> tuple[Tensor, tuple[float, ...]]:
        """Build one row for each argument: a hash of shapes, types and integers, `BUCKETS` sums, their tolerances.

        The first row holds the number of the forward.

        Args:
            arguments: arguments by name; others than `names` are ignored.
            forward: number of the forward, the same on all ranks; seed for the choice of elements.
        Returns: the table, float64 [1 + len(names), 1 + 2 * BUCKETS] on `device` (the host does not wait for a GPU),
            and the hashes.
        """
        structures, tensors = [float(forward)], list[tuple[Tensor, _Place]]()
        for row, name in enumerate(self.names, 1):
            leaves = list(compared_leaves(name, arguments.get(name)))
            kinds = [(path, _shape_and_dtype(x)) for path, x in leaves] + list(plain_values(name, arguments.get(name)))
            structures.append(_hash(kinds) if kinds else 0.0)
            readable = [x for x in (_readable(x) for _, x in leaves) if x is not None and x.numel()]
            tensors += [(x, _Place(row, number, len(readable))) for number, x in enumerate(readable)]
        tensors.sort(key=lambda pair: not pair[0].is_floating_point())
        contents = torch.zeros(2, len(structures), BUCKETS, dtype=torch.float64, device=device)
        for source in dict.fromkeys(x.device for x, _ in tensors):
            here = [(x, place) for x, place in tensors if x.device == source]
            reading = reading_of(tuple((x.numel(), x.dtype, place) for x, place in here), source)
            sums = reading.sums([x for x, _ in here], forward, num_sums=len(structures) * BUCKETS)
            contents += to_device(sums, device).view_as(contents)
        column = torch.tensor(structures, dtype=torch.float64, device="cpu")[:, None]
        return torch.cat([to_device(column, device), *contents], 1), tuple(structures[1:])


class _Place(NamedTuple):
    """Place of a tensor in the table: row of its argument, number in the argument, number of the argument's tensors."""

    row: int
    number: int
    of_argument: int


@dataclass(frozen=True)
class Reading:
    """Positions and buckets of the elements that are read from several tensors, those with floats first.

    Attributes:
        counts: number of elements to read from each tensor.
        num_floats: number of floating-point elements.
        intervals: for each element that is chosen again in each forward: start and width of its interval, and a number
            that no other element of the tensor has, int64 [3, chosen].
        weights, buckets: weight and bucket of each element.
        owners, sums_of: for each bucket, the index of its tensor, and the index of the sum that it is added to.
        shares, tolerances: for each bucket, one over the number of buckets of its tensor, and a relative error.
    """

    counts: tuple[int, ...]
    num_floats: int
    intervals: Tensor
    weights: Tensor
    buckets: Tensor
    owners: Tensor
    sums_of: Tensor
    shares: Tensor
    tolerances: Tensor

    def sums(self, tensors: Sequence[Tensor], forward: int, *, num_sums: int) -> Tensor:
        """Compute all sums, and their tolerances: float64 [2, num_sums]."""
        values = self._read(tensors, forward)
        floats = values[: self.num_floats]
        floats.nan_to_num_(nan=_NAN, posinf=_LARGEST, neginf=-_LARGEST).clamp_(-_LARGEST, _LARGEST)
        added = torch.stack([values * self.weights, values.square()])
        sums, squares = added.new_zeros(2, len(self.owners)).index_add_(1, self.buckets, added)
        means = squares.new_zeros(len(tensors)).index_add_(0, self.owners, squares * self.shares)
        scale = squares.maximum(means[self.owners]).sqrt()  # RMS: a lower bound for almost-zero buckets
        added = torch.stack([sums, scale * self.tolerances])
        return added.new_zeros(2, num_sums).index_add_(1, self.sums_of, added)

    def _read(self, tensors: Sequence[Tensor], forward: int) -> Tensor:
        """Read the elements of all tensors: float64 [elements]."""
        starts, widths, numbers = self.intervals
        chosen = starts + _mix(numbers, forward) % widths
        parts, begin = [self.weights[:0]], 0  # the first part, without elements, makes the result float64
        for x, count in zip(tensors, self.counts, strict=True):
            if x.numel() == count:
                parts.append(x.reshape(-1))
                continue
            indices = chosen[begin : begin + count]
            parts.append(x.view(-1)[indices] if x.is_contiguous() else torch.take(x, indices))
            begin += count
        return torch.cat(parts)


@lru_cache(maxsize=16)
def reading_of(tensors: tuple[tuple[int, torch.dtype, _Place], ...], device: torch.device) -> Reading:
    """Decide what to read of tensors on a device. Args: tensors: number of elements, dtype and place of each."""
    drawn = np.random.Generator(np.random.PCG64(0)).random((2, SAMPLES + BUCKETS))
    weights = (drawn[0] + 0.5) * np.where(drawn[1] < 0.5, -1.0, 1.0)  # random sign, magnitude 0.5 to 1.5
    counts, num_floats, num_buckets = list[int](), 0, 0
    intervals, elements, of_buckets, factors = [np.zeros((3, 0), np.int64)], list[Any](), list[Any](), list[Any]()
    for index, (numel, dtype, place) in enumerate(tensors):
        size = max(1, BUCKETS // place.of_argument)  # number of buckets
        most = max(1, SAMPLES // place.of_argument // size) * size
        count = min(numel, most)
        width = -(-count // size)  # number of elements in a bucket
        counts.append(count)
        num_floats += count * dtype.is_floating_point
        if numel > most:
            bounds = np.arange(most + 1) * numel // most
            intervals.append(np.stack([bounds[:-1], np.diff(bounds), np.arange(most)]))
        elements.append(num_buckets + np.arange(count) // width)
        sums_of = place.row * BUCKETS + (place.number * size + np.arange(size)) % BUCKETS
        of_buckets.append(np.stack([np.full(size, index), sums_of]))
        factors.append(np.stack([np.full(size, 1 / size), np.full(size, _tolerance(dtype, single=width == 1))]))
        num_buckets += size
    weights = np.concatenate([weights[:count] for count in counts])
    arrays = (np.concatenate(x, -1) for x in (intervals, elements, of_buckets, factors))
    chosen, buckets, indices, scales = (to_device(torch.from_numpy(x), device) for x in arrays)
    of_elements = to_device(torch.from_numpy(weights), device)
    return Reading(tuple(counts), num_floats, chosen, of_elements, buckets, *indices, *scales)


def _mix(numbers: Tensor, forward: int) -> Tensor:
    """Compute pseudo-random ints >= 0 from ints, without torch's generators, equal on all ranks."""
    x = numbers * 0x9E3779B1 + (forward & 0x3FFFFFFF) * 0x85EBCA6B
    x = (x ^ (x >> 15)) & 0xFFFFFFFF
    x = x * 0x2C1B3C6D
    return (x ^ (x >> 12)) & 0x7FFFFFFF


def sampled_difference(by_rank: npt.NDArray[np.float64], names: Sequence[str]) -> tuple[int, str] | None:
    """Return the first rank that differs from rank 0, and a description; None if all are equal.

    Args: by_rank: the tables of all ranks, [ranks, (1 + len(names)) * (1 + 2 * BUCKETS)].
    """
    by_rank = by_rank.reshape(len(by_rank), 1 + len(names), -1)
    counts, by_rank = by_rank[:, 0, 0], by_rank[:, 1:]
    for rank, count in enumerate(counts):
        if count != counts[0]:
            return rank, f"one has called the model {int(count)} times and the other {int(counts[0])} times"
    structures, sums, tolerances = by_rank[..., 0], by_rank[..., 1 : 1 + BUCKETS], by_rank[..., 1 + BUCKETS :]
    unlike = structures != structures[:1]
    apart = ~(np.abs(sums - sums[:1]) <= np.maximum(tolerances, tolerances[:1])).all(-1)
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


def _tolerance(dtype: torch.dtype, *, single: bool) -> float:
    """Return how much two sums may differ and still count as equal, relative to the norm of their elements."""
    if not dtype.is_floating_point:
        return 1e-9  # integers are equal; only their sum is rounded
    return max(_TOLERANCE if single else _TOLERANCE_OF_SUMS, 2 * torch.finfo(dtype).eps)
