"""Ranks that share a sample must be given the same one. Where they are not, say so, and which argument."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.errors import PeerMismatchError
from lightning_cp.mesh import Groups

CheckPeers = Literal["first", "always", "off"]
CHECK_PEERS: tuple[str, ...] = ("first", "always", "off")

Digest = tuple[str, list[float]]

_FIRST_FORWARDS = 2
_PROJECTIONS = 4
_TOLERANCE = 1e-3  # of the norm; other data differs by about its norm, in each of the projections


def forwards_to_check(check_peers: object) -> int:
    """How many forwards are compared, -1 for all. Raises: ValueError for an unknown setting."""
    if check_peers not in CHECK_PEERS:
        raise ValueError(f"check_peers={check_peers!r} is not one of {', '.join(CHECK_PEERS)}")
    return {"first": _FIRST_FORWARDS, "always": -1, "off": 0}[str(check_peers)]


def compare_peers(arguments: dict[str, Any], *, groups: Groups) -> None:
    """Compare shapes, and a checksum of the contents, of all tensors in `arguments` between context peers.

    Small differences (of kernels that do not reproduce bit for bit) pass. Synchronises the host.
    Ranks: all of the context group. Raises: PeerMismatchError, on all of them, naming the argument.
    """
    if groups.context is None:
        return
    mine = {name: digest(x) for name, x in _tensors("", arguments)}
    everyone: list[Any] = [None] * groups.context_size
    dist.all_gather_object(everyone, mine, group=groups.context)
    for rank, theirs in enumerate(everyone):
        problem = difference(everyone[0], theirs)
        if problem:
            raise PeerMismatchError(
                f"context peers must be given the same data, but {problem} (rank {rank} of the context group against "
                "rank 0): give ranks of one context group the same batch, noise and timesteps"
            )


def difference(first: dict[str, Digest], other: dict[str, Digest]) -> str | None:
    """What differs between the named digests of two ranks; None where nothing does."""
    for name in dict.fromkeys([*first, *other]):
        if name not in first or name not in other:
            return f"{name} was given to one of them only"
        (shape_a, sums_a), (shape_b, sums_b) = first[name], other[name]
        if shape_a != shape_b:
            return f"{name} has {shape_b} on one and {shape_a} on the other"
        norm = max(sums_a[0], sums_b[0])
        if any(not abs(a - b) <= _TOLERANCE * norm and not (a != a and b != b) for a, b in zip(sums_a, sums_b)):
            return f"the contents of {name} differ"
    return None


def digest(x: Tensor) -> Digest:
    """Shape and dtype, then the norm and some projections."""
    what = f"{tuple(x.shape)} {x.dtype}"
    with torch.no_grad():
        flat = torch.view_as_real(x).flatten() if x.is_complex() else x.detach().flatten()
        flat = flat.double()
        generator = torch.Generator().manual_seed(flat.numel())
        sums = [flat.norm()]
        for _ in range(_PROJECTIONS):
            signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8)
            sums.append(flat @ (signs.to(flat.device).double() * 2 - 1))
        return what, torch.stack(sums).tolist()


def _tensors(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for name, x in value.items():
            yield from _tensors(f"{prefix}[{name!r}]" if prefix else str(name), x)
    elif isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            yield from _tensors(f"{prefix}[{i}]", x)
