"""Gather what ranks have found, so that an error or a difference on one rank is raised on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.config import ROTATE_METHODS, ContextParallelConfig
from lightning_cp.errors import CallFailedError, PeerMismatchError
from lightning_cp.mesh.groups import MeshGroups


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks of a group, in rank order. Args: group: None: this rank only. Ranks: the group."""
    gathered = [value] * (1 if group is None else dist.get_world_size(group))
    if len(gathered) > 1:
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def raise_on_all(error: Exception | None, what: str, group: dist.ProcessGroup | None) -> None:
    """Raise the error of any rank on all ranks of a group, this rank's own or a CallFailedError. Ranks: the group."""
    texts = gather_objects(None if error is None else text_of(error), group)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise CallFailedError(f"rank {rank} {what}: {text}")


def first_difference(by_rank: Sequence[Mapping[str, str]], missing: str) -> tuple[str, int, str, str] | None:
    """Return the first value that differs from rank 0's: name, rank, and both; None: no difference, or one rank."""
    for rank, other in enumerate(by_rank):
        for name in dict.fromkeys((*by_rank[0], *other)):
            first, here = by_rank[0].get(name, missing), other.get(name, missing)
            if first != here:
                return name, rank, first, here
    return None


def compare_settings(groups: MeshGroups, config: ContextParallelConfig) -> None:
    """Check that all ranks of a context group were given the same settings and shares.

    Ranks: all of the context group. Raises: PeerMismatchError, on all of them.
    """
    if groups.context is None:
        return
    shares = groups.shares or [1] * groups.context_size
    local = [ROTATE_METHODS.index(config.rotate_method), int(config.convert_to_fp32), *shares]
    by_rank = [
        {"rotate_method": ROTATE_METHODS[method], "convert_to_fp32": str(bool(fp32)), "shares": str(shares)}
        for method, fp32, *shares in all_gather_ints(local, group=groups.context)
    ]
    if (difference := first_difference(by_rank, "")) is not None:
        name, rank, first, here = difference
        raise PeerMismatchError(
            f"{name} must be equal on all ranks of a context group, but rank {rank} was given {here} and rank 0 {first}"
        )


def text_of(error: BaseException) -> str:
    """Return the class and text of an error, for other ranks."""
    return f"{type(error).__name__}: {error}"
