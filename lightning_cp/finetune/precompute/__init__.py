"""Encode training media and captions once, into a latent cache, on any number of ranks."""

from lightning_cp.finetune.precompute.encode import encode_captions, encode_sources
from lightning_cp.finetune.precompute.loading import Loader
from lightning_cp.finetune.precompute.ranks import EncodingRanks, rank_device
from lightning_cp.finetune.precompute.run import precompute
from lightning_cp.finetune.precompute.settings import Precomputed, PrecomputeSettings
from lightning_cp.finetune.precompute.usable import buckets_of, default_size

__all__ = [
    "EncodingRanks",
    "Loader",
    "PrecomputeSettings",
    "Precomputed",
    "buckets_of",
    "default_size",
    "encode_captions",
    "encode_sources",
    "precompute",
    "rank_device",
]
