"""Exact attention over tokens that several ranks hold: ring, Ulysses, and Ulysses around ring."""

from lightning_cp.attention.api import attend_across, context_parallel_attention

__all__ = ["attend_across", "context_parallel_attention"]
