"""Store encoded training samples on disk, and train from them without autoencoders and text encoders.

Each sample and each text is one file, named by what it was made from. Rank 0 calls `prepare_cache`, every rank writes
with its `CacheWriter`, and rank 0 completes the cache with `CacheWriter.finish`. Training reads a `LatentCache` through
`LatentData`.
"""

from lightning_cp.finetune.latent_cache.cache import CacheWriter, LatentCache
from lightning_cp.finetune.latent_cache.dataset import LatentData, text_lengths
from lightning_cp.finetune.latent_cache.fingerprint import Fingerprint, check_fresh, differences, fingerprint_of
from lightning_cp.finetune.latent_cache.index import CacheIndex, prepare_cache
from lightning_cp.finetune.latent_cache.rows import MediaRow, caption_hash

__all__ = [
    "CacheIndex",
    "CacheWriter",
    "Fingerprint",
    "LatentCache",
    "LatentData",
    "MediaRow",
    "caption_hash",
    "check_fresh",
    "differences",
    "fingerprint_of",
    "prepare_cache",
    "text_lengths",
]
