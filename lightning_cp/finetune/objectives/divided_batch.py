"""Hold a data rank's samples of a global batch with samples of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_cp.finetune.families import StoredBatch


@dataclass(frozen=True)
class BatchPart:
    """Samples of one size.

    Args:
        stored: the samples.
        indices: their positions in the global batch.
        weights: factor of each sample's loss.
        scale: factor of the sum of their losses, see `DrawnSample`.
    """

    stored: StoredBatch
    indices: tuple[int, ...]
    weights: tuple[float, ...]
    scale: float


class DividedBatch:
    """Parts of a batch that pass the model one after the other; see `DividedBatchSampler`.

    It is not a list, because Lightning's precision plugins cast the tensors in lists and dataclasses. Lightning still
    moves it to the device, because it has a method `to`.

    Args:
        parts: the parts.
        degree: context degree of the step, see `lightning_cp.data.divided_sampler`.
        seed: seed of random numbers such as dropout, the same on all ranks that share the samples.
    """

    def __init__(self, parts: Sequence[BatchPart], degree: int, seed: int) -> None:
        self.parts, self.degree, self.seed = list(parts), degree, seed

    def __len__(self) -> int:
        """Return the number of samples, without repeated ones."""
        return sum(len(part.indices) for part in self.parts if part.scale)

    def to(self, device: torch.device | str, **_: Any) -> DividedBatch:
        """Return a copy on a device, see `StoredBatch.to`."""
        return self._map(lambda stored: stored.to(device))

    def pin_memory(self) -> DividedBatch:
        """Return a copy in pinned memory. PyTorch's DataLoader calls it."""
        return self._map(StoredBatch.pin_memory)

    def _map(self, function: Callable[[StoredBatch], StoredBatch]) -> DividedBatch:
        return DividedBatch(
            [replace(part, stored=function(part.stored)) for part in self.parts], self.degree, self.seed
        )
