"""Compare the forward arguments of the ranks of a context group: ranks that share a sample must get equal ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.agree import gather_objects
from lightning_cp.comm.background import BackgroundGather, gather_device, gather_in_background, is_capturing
from lightning_cp.compat.torch_names import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
    set_forward_ad,
    temporarily_clear_interpreter_stack,
)
from lightning_cp.config import CHECK_PEERS
from lightning_cp.engine.peers.checksum import norm_and_projections
from lightning_cp.engine.peers.samples import Sampler, compared_leaves, plain_values, sampled_difference
from lightning_cp.errors import PeerMismatchError
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.nest import replace

Digest = tuple[str, list[float]]

_FIRST_FORWARDS = 2
_PROJECTIONS = 4
_TOLERANCE = 1e-3  # relative to the norm; different data differs by about its norm in each projection
_REMEDY = (
    "give ranks of one context group the same batch, noise and timesteps. Random numbers are the same where they are "
    "drawn after the strategy has set up the module, by the same calls on each of these ranks, or from "
    "strategy.generator(seed)"
)


def forwards_to_check(check_peers: object) -> int:
    """Return the number of first forwards that are compared in full, -1 for all.

    Raises: ValueError: an unknown setting.
    """
    if check_peers not in CHECK_PEERS:
        raise ValueError(f"check_peers={check_peers!r} is not one of {', '.join(CHECK_PEERS)}")
    return {"sampled": _FIRST_FORWARDS, "first": _FIRST_FORWARDS, "always": -1, "off": 0}[str(check_peers)]


@dataclass(frozen=True)
class _Sampled:
    """A comparison in progress: number of the forward, name of the model, gathered samples, world group."""

    forward: int
    model: str
    gather: BackgroundGather
    world: dist.ProcessGroup | None


class PeerCheck:
    """Compares the arguments of one model's forwards between the ranks of a context group.

    Args:
        groups: process groups of the mesh.
        names: parameter names of the model's forward.
        check_peers: "first": compare the first 2 forwards in full. "sampled": also compare samples of all later
            forwards in the background. A difference is raised in the next forward or by `finish`; if this rank's
            tensors have new shapes, in the same forward. "always": compare all forwards in full. "off": compare none.
    Raises: ValueError: an unknown setting.
    """

    def __init__(self, groups: MeshGroups, names: Sequence[str], check_peers: str) -> None:
        self._groups = groups
        self._names, self._check_peers = names, check_peers
        self._left = forwards_to_check(check_peers)
        self._sampler = Sampler(names) if check_peers == "sampled" else None
        self._forward, self._model = 0, ""
        self._table: tuple[Tensor, tuple[float, ...]] | None = None
        self._pending: _Sampled | None = None
        self._siblings = {groups.name: self}  # checks of the same model for other groups
        self._shapes: set[tuple[float, ...]] = set()  # that were compared in the last forward, on GPUs in all forwards

    def of_copy(self) -> PeerCheck:
        """Return a new check with the same settings, for a deep copy of the model."""
        return PeerCheck(self._groups, self._names, self._check_peers)

    def of_groups(self, groups: MeshGroups) -> PeerCheck:
        """Return the check with the same settings for the ranks of other groups; it is new for groups without one."""
        if groups.name not in self._siblings:
            self._siblings[groups.name] = PeerCheck(groups, self._names, self._check_peers)
            self._siblings[groups.name]._siblings = self._siblings
        return self._siblings[groups.name]

    @property
    def is_on(self) -> bool:
        """True if any forward may be compared."""
        return self._check_peers != "off" or self._left != 0

    @property
    def compares_in_full(self) -> bool:
        """True if the next forward's arguments are compared in full."""
        return self._left != 0 and not is_capturing()

    def compare_next_in_full(self) -> None:
        """Compare the next forward in full, with any setting."""
        self._left = self._left or 1

    def check(self, arguments: dict[str, Any], *, model: str) -> None:
        """Raise a difference found in the previous forward, then compare (in full) or sample this forward's arguments.

        Args: given: arguments by name. model: name of the model, for errors.
        Ranks: all of the context group. Raises: PeerMismatchError, on all of them, naming argument and forward.
        """
        group, in_full = self._groups.context, self.compares_in_full
        self._left -= in_full and self._left > 0
        self._table = None
        if group is None or is_capturing():  # the next forward outside of the graph reads the comparison in progress
            return
        with without_transforms() as plain:
            self.finish()
            if in_full:
                self._forward += 1
                compare_peers(plain(arguments), groups=self._groups)
            elif self._sampler is not None:
                device = gather_device(group)
                self._table = self._sampler.table(plain(arguments), forward=self._forward + 1, device=device)
                self._model = model

    def start(self) -> None:
        """Start to compare this forward's samples in the background.

        Called when a forward splits its first tensor: a forward that splits none needs no other rank. Further calls in
        the same forward do nothing.

        Ranks: all of the context group. Raises: PeerMismatchError: shapes are new on this rank and a difference is
        found.
        """
        if self._table is None:
            return
        assert self._groups.context is not None, "else nothing is sampled"
        (table, shapes), self._table = self._table, None
        self._forward += 1
        with without_transforms():
            gather = gather_in_background(table.flatten(), group=self._groups.context)
        self._pending = _Sampled(self._forward, self._model, gather, dist.group.WORLD)
        if shapes not in self._shapes:  # with unequal shapes, transfers in this forward would fail or hang
            self.finish()
        self._shapes = {shapes} | (self._shapes if table.is_cuda else set())

    def finish(self, *, within_s: float | None = None) -> None:
        """Read the pending background comparison, and raise if it found a difference.

        Args: within_s: seconds after which an unfinished comparison is dropped; None: wait for the other ranks.
        Raises: PeerMismatchError, on all ranks of the context group, naming argument and forward.
        """
        pending, self._pending = self._pending, None
        if pending is None or self._sampler is None or pending.world is not dist.group.WORLD:
            return  # the compared world group was destroyed; a new one may exist
        if within_s is not None and not pending.gather.is_done(within_s=within_s):
            return
        with without_transforms():
            by_rank = pending.gather.read()
        if (difference := sampled_difference(by_rank, self._sampler.names)) is not None:
            rank, problem = difference
            raise _mismatch(f"{problem} in forward {pending.forward} of {pending.model}", rank)

    def drop(self) -> None:
        """Drop the pending comparison, after a call of several forwards that has raised."""
        self._pending = self._table = None


def compare_peers(arguments: dict[str, Any], *, groups: MeshGroups) -> None:
    """Compare shapes and a checksum of the contents of all tensors in `arguments`, and its numbers and strings.

    Small differences (from kernels that are not bitwise reproducible) pass. Synchronises the host.
    Ranks: all of the context group. Raises: PeerMismatchError, on all of them, naming the argument.
    """
    if groups.context is None:
        return
    local = {name: digest(x) for name, x in compared_leaves("", arguments)}
    local |= {name: (text, [0.0]) for name, text in plain_values("", arguments)}
    by_rank = gather_objects(local, groups.context)
    for rank, other in enumerate(by_rank):
        problem = digest_difference(by_rank[0], other)
        if problem:
            raise _mismatch(problem, rank)


def _mismatch(problem: str, rank: int) -> PeerMismatchError:
    return PeerMismatchError(
        f"context peers must be given the same data, but {problem} (rank {rank} of the context group against rank 0): "
        f"{_REMEDY}"
    )


def digest_difference(first: dict[str, Digest], other: dict[str, Digest]) -> str | None:
    """Describe the first difference between the named digests of two ranks; None if there is none."""
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
    """Return shape and dtype as text, and a list of the norm and some random projections."""
    return f"{tuple(x.shape)} {x.dtype}", norm_and_projections(x, _PROJECTIONS)


@contextmanager
def without_transforms() -> Iterator[Any]:
    """Disable gradients, tangents and batching inside the context. Yields: a function that unwraps arguments."""
    with ExitStack() as stack:
        has_wrappers = peek_interpreter_stack() is not None
        if has_wrappers:
            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch.no_grad())
        stack.enter_context(set_forward_ad(False))
        yield partial(replace, Tensor, _unwrapped) if has_wrappers else lambda x: x


def _unwrapped(x: Tensor) -> Tensor:
    """Return a tensor without torch.func's wrappers."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x
