"""Exact attention over tokens sharded across ranks: ring, Ulysses, and unified (Ulysses around ring)."""

from lightning_cp.attention.api import attend_across, context_parallel_attention
from lightning_cp.attention.async_ulysses import InTransit, start_ulysses

__all__ = ["InTransit", "attend_across", "context_parallel_attention", "start_ulysses"]
