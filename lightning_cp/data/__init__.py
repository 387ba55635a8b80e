"""Load the same samples on all ranks of a context group: samplers, seeds and random numbers."""

from lightning_cp.data.bucket_sampler import BucketBatchSampler, EndlessLoader, bucket_loader
from lightning_cp.data.keyed_random import RandomStream, keyed_generator
from lightning_cp.data.packing import PackedBatches, PackedCollate
from lightning_cp.data.peer_batches import GroupBatches
from lightning_cp.data.random_state import WorkerSeed, worker_init_fn
from lightning_cp.data.sampler import EndlessBatches, GlobalBatchSampler

__all__ = [
    "BucketBatchSampler",
    "EndlessBatches",
    "EndlessLoader",
    "GlobalBatchSampler",
    "GroupBatches",
    "PackedBatches",
    "PackedCollate",
    "RandomStream",
    "WorkerSeed",
    "bucket_loader",
    "keyed_generator",
    "worker_init_fn",
]
