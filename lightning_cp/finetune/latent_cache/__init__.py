"""Store encoded training samples on disk, and train from them without autoencoders and text encoders.

Rank 0 calls `prepare_cache`, every rank writes with its `CacheWriter`, and rank 0 calls `PreparedCache.finish`.
Training reads a `LatentCache` through `LatentData`.
"""

from lightning_cp.finetune.latent_cache.cache import LatentCache
from lightning_cp.finetune.latent_cache.dataset import LatentData, text_lengths
from lightning_cp.finetune.latent_cache.fingerprint import Fingerprint, check_fresh, differences, fingerprint_of
from lightning_cp.finetune.latent_cache.folder import PreparedCache, prepare_cache
from lightning_cp.finetune.latent_cache.index import CacheIndex
from lightning_cp.finetune.latent_cache.rows import MediaRow, caption_hash
from lightning_cp.finetune.latent_cache.writer import CacheWriter

__all__ = [
    "CacheIndex",
    "CacheWriter",
    "Fingerprint",
    "LatentCache",
    "LatentData",
    "MediaRow",
    "PreparedCache",
    "caption_hash",
    "check_fresh",
    "differences",
    "fingerprint_of",
    "prepare_cache",
    "text_lengths",
]
