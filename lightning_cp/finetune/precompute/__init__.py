"""Encode training media and captions once, into a latent cache, on any number of ranks."""

from lightning_cp.finetune.precompute.encode import encode_captions, encode_sources
from lightning_cp.finetune.precompute.loading import Loader
from lightning_cp.finetune.precompute.ranks import EncodingRanks, rank_device
from lightning_cp.finetune.precompute.run import Precomputed, precompute
from lightning_cp.finetune.precompute.usable import buckets_of, default_size
from lightning_cp.finetune.settings import PrecomputeSettings

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
