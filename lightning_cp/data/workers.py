"""Seed DataLoader workers by data rank."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_cp.data.keyed_random import RandomStream, keyed_generator


@dataclass(frozen=True)
class WorkerSeed:
    """Seed Python, NumPy and torch in a DataLoader worker from (seed, data_rank, worker_id) only."""

    seed: int
    data_rank: int

    def __call__(self, worker_id: int) -> None:
        drawn = keyed_generator(self.seed, RandomStream.WORKER, step=self.data_rank, index=worker_id).integers(
            1 << 63, size=3, dtype=np.int64
        )
        random.seed(int(drawn[0]))
        np.random.seed(int(drawn[1]) % (1 << 32))
        torch.manual_seed(int(drawn[2]))


def worker_init_fn(seed: int, data_rank: int) -> WorkerSeed:
    """Create a `worker_init_fn` for DataLoader that seeds by data rank.

    Ranks of one context group then augment a sample in the same way, and data ranks augment differently. (Lightning
    seeds by global rank, which would give the ranks of one group different data.)
    """
    return WorkerSeed(seed, data_rank)


def seeds_of_loader(seed: int, data_rank: int) -> dict[str, Any]:
    """Return the arguments of a DataLoader that make its random numbers independent of the global generator."""
    return {
        "worker_init_fn": worker_init_fn(seed, data_rank),
        "generator": torch.Generator().manual_seed(seed),  # iter() draws from it
    }
