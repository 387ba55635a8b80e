"""Data that every rank of a context group sees alike: one global order, keyed random numbers, small real data sets."""

from lightning_cp.data.digits import Digits, MovingDigits, Scans, load_scans
from lightning_cp.data.group_batches import GroupBatches
from lightning_cp.data.keyed_random import Stream, keyed_generator
from lightning_cp.data.loader import EndlessLoader
from lightning_cp.data.sampler import EndlessBatches, GlobalBatchSampler
from lightning_cp.data.workers import WorkerSeed, worker_init_fn

__all__ = [
    "Digits",
    "EndlessBatches",
    "EndlessLoader",
    "GlobalBatchSampler",
    "GroupBatches",
    "MovingDigits",
    "Scans",
    "Stream",
    "WorkerSeed",
    "keyed_generator",
    "load_scans",
    "worker_init_fn",
]
