"""Keys of a sequence that is generated chunk by chunk: each rank keeps its shard of every chunk."""

from lightning_cp.attention.key_cache.cache import KeyCache

__all__ = ["KeyCache"]
