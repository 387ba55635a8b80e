"""Attention with a sparse mask: which tiles of queries attend to which keys, and what ranks need of each other."""

from lightning_cp.attention.sparse.local import balanced_order, imbalance
from lightning_cp.attention.sparse.mask import SparseMask

__all__ = ["SparseMask", "balanced_order", "imbalance"]
