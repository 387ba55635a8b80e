"""Exact attention over tokens sharded across ranks: ring, Ulysses, and unified (Ulysses around ring)."""

from lightning_cp.attention.api import attend_across, context_parallel_attention

__all__ = ["attend_across", "context_parallel_attention"]
