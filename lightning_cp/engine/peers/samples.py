"""Samples of the arguments of a forward, small enough to be compared between ranks in every forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

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
        mixed: dict[torch.device, Tensor] = {}
        nothing = torch.zeros(2 * BUCKETS, dtype=torch.float64, device=device)
        structures, contents = [float(forward)], [nothing]
        for name in self.names:
            leaves = list(compared_leaves(name, arguments.get(name)))
            kinds = [(path, _shape_and_dtype(x)) for path, x in leaves] + list(plain_values(name, arguments.get(name)))
            structures.append(_hash(kinds) if kinds else 0.0)
            readable = [x for x in (_readable(x) for _, x in leaves) if x is not None and x.numel()]
            for x in readable:
                if x.device not in mixed:
                    mixed[x.device] = _mix(forward, x.device)
            contents.append(self._row(readable, mixed, device) if readable else nothing)
        column = torch.tensor(structures, dtype=torch.float64, device="cpu")[:, None]
        return torch.cat([to_device(column, device), torch.stack(contents)], 1), tuple(structures[1:])

    def _row(self, leaves: Sequence[Tensor], mixed: Mapping[torch.device, Tensor], device: torch.device) -> Tensor:
        """Compute sums, then tolerances, of all tensors of one argument: [2 * BUCKETS]."""
        buckets = max(1, BUCKETS // len(leaves))
        each = [to_device(self._sums(x, buckets, len(leaves), mixed[x.device]), device) for x in leaves]
        both = torch.cat(each, 1)
        both = F.pad(both, (0, -both.shape[1] % BUCKETS))
        return both.view(2, -1, BUCKETS).sum(1).flatten()

    def _sums(self, x: Tensor, buckets: int, leaves: int, mixed: Tensor) -> Tensor:
        """Compute sums and tolerances of one tensor: [2, buckets]."""
        dtype = x.dtype
        values = self._read(x, max(1, SAMPLES // leaves // buckets) * buckets, mixed).double()
        if dtype.is_floating_point:
            values = values.nan_to_num(nan=_NAN, posinf=_LARGEST, neginf=-_LARGEST).clamp(-_LARGEST, _LARGEST)
        values = F.pad(values, (0, -values.numel() % buckets)).view(buckets, -1)
        weights = constants_on(x.device)[1][: values.numel()].view_as(values)
        norms = values.square().sum(1).sqrt()
        scale = norms.maximum(norms.square().mean().sqrt())  # RMS: a lower bound for almost-zero buckets
        return torch.stack([(values * weights).sum(1), scale * _tolerance(dtype, single=values.shape[1] == 1)])

    def _read(self, x: Tensor, count: int, mixed: Tensor) -> Tensor:
        """Read all elements of x if there are at most `count`, otherwise `count` of them."""
        if x.numel() <= count:
            return x.reshape(-1)
        starts, widths = intervals(x.numel(), count, x.device)
        chosen = starts + mixed[:count] % widths
        return x.view(-1)[chosen] if x.is_contiguous() else torch.take(x, chosen)


def _mix(forward: int, device: torch.device) -> Tensor:
    """Compute pseudo-random ints >= 0 without torch's generators, equal on all ranks: [SAMPLES + BUCKETS]."""
    x = constants_on(device)[0] * 0x9E3779B1 + (forward & 0x3FFFFFFF) * 0x85EBCA6B
    x = (x ^ (x >> 15)) & 0xFFFFFFFF
    x = x * 0x2C1B3C6D
    return (x ^ (x >> 12)) & 0x7FFFFFFF


@lru_cache
def constants_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return indices 0, 1, ... and weights (random sign, magnitude 0.5 to 1.5), [SAMPLES + BUCKETS] each."""
    drawn = np.random.Generator(np.random.PCG64(0)).random((2, SAMPLES + BUCKETS))
    weights = (drawn[0] + 0.5) * np.where(drawn[1] < 0.5, -1.0, 1.0)
    return torch.arange(SAMPLES + BUCKETS, device=device), to_device(torch.from_numpy(weights), device)


@lru_cache(maxsize=64)
def intervals(elements: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return starts and widths of `count` equal intervals of a tensor's elements, [count] each."""
    bounds = torch.arange(count + 1, device=device) * elements // count
    return bounds[:-1], bounds.diff()


def sampled_difference(by_rank: npt.NDArray[np.float64], names: Sequence[str]) -> tuple[int, str] | None:
    """Return the first rank that differs from rank 0, and a description; None if all are equal.

    Args: by_rank: the tables of all ranks, [ranks, 1 + len(names), 1 + 2 * BUCKETS].
    """
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
