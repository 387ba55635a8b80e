"""Compare what must be equal on all ranks because their weights are averaged: Hydra's job, and optimizer settings."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.comm.agree import first_difference, gather_objects
from lightning_cp.comm.background import BackgroundGather, gather_device, gather_in_background
from lightning_cp.errors import PeerMismatchError
from lightning_cp.strategies.ranks.sweep_ranks import job_overrides


def compare_jobs() -> None:
    """Check that all ranks run the same job of Hydra. Ranks: the whole world.

    Raises: PeerMismatchError: on all ranks, if the overrides differ.
    """
    _compare(
        {"overrides of the Hydra job": " ".join(job_overrides())},
        "all ranks must run the same job, so a sweeper that draws values must not run on each rank: let the strategy "
        "start the ranks, or start one job at a time",
    )


class EqualOptimizers:
    """Compare the settings of optimizers between ranks, when they are set up and in every 8th step.

    Starting an exchange takes about 0.3 ms of the main thread, so not every step has one.
    """

    def __init__(self) -> None:
        self._steps = 0  # since the optimizers were set up
        self._last: tuple[BackgroundGather, dict[str, str]] | None = None

    def compare(self, optimizers: Sequence[Any]) -> None:
        """Compare optimizers. Ranks: the whole world. Raises: PeerMismatchError: on all ranks, if settings differ."""
        self._steps, self._last = 0, None
        settings = {name: value for i, one in enumerate(optimizers) for name, value in _settings(one, i).items()}
        _compare({"number of optimizers": str(len(optimizers)), **settings}, _REMEDY)

    def step(self, optimizer: Any) -> None:
        """Compare an optimizer before every 8th step, in the background: a difference is raised in the step after.

        Ranks: the whole world. Raises: PeerMismatchError: on all ranks, if settings differed in the step before.
        """
        world = dist.group.WORLD
        if world is None or dist.get_world_size() == 1:
            return
        last, self._last = self._last, None
        if last is not None:
            sums = last[0].read()[:, 0]
            if (sums != sums[0]).any():
                _compare(last[1], _REMEDY)
        compares, self._steps = self._steps % _EVERY == 0, self._steps + 1
        if not compares:
            return
        settings, device = _settings(optimizer, 0), gather_device(world)
        checksum = zlib.crc32(repr(settings).encode())
        value = torch.full((1,), float(checksum), dtype=torch.float64, device=device)  # without a copy from the host
        self._last = gather_in_background(value, group=world), settings

    @override
    def __reduce__(self) -> tuple[type[EqualOptimizers], tuple[()]]:
        return type(self), ()


_EVERY = 8  # steps
_REMEDY = "weights are averaged over all ranks, so all must use the same settings"


def _settings(optimizer: Any, number: int) -> dict[str, str]:
    """Return the class and the settings of each parameter group, as text by name."""
    inner = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", optimizer)
    name = type(inner).__name__
    settings = {f"class of optimizer {number}": name}
    settings[f"number of parameter groups of {name}"] = str(len(inner.param_groups))
    for i, group in enumerate(inner.param_groups):
        settings[f"number of parameters in group {i} of {name}"] = str(len(group["params"]))
        for key, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
                value = value.item()
            if _is_plain(value):
                settings[f"{key} of {name} in group {i}"] = repr(value)
    return settings


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _compare(settings: dict[str, str], remedy: str) -> None:
    difference = first_difference(gather_objects(settings, dist.group.WORLD), missing="missing")
    if difference is not None:
        name, rank, first, here = difference
        raise PeerMismatchError(f"{name} differs: {first} on rank 0, {here} on rank {rank}; {remedy}")
