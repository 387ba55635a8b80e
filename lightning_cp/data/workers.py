"""Seeds of DataLoader workers."""

import random
from dataclasses import dataclass

import numpy as np
import torch

from lightning_cp.data.keyed_random import RandomStream, keyed_generator


@dataclass(frozen=True)
class WorkerSeed:
    """Seeds python, numpy and torch in a worker from (seed, data_rank, worker), and nothing else."""

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
    """A `worker_init_fn` for DataLoader that seeds from the data rank.

    Ranks of one context group augment a sample in the same way; data ranks augment theirs in different ways. (Seeds
    from the global rank, which is what Lightning gives, would feed the ranks of one group different data.)
    """
    return WorkerSeed(seed, data_rank)
