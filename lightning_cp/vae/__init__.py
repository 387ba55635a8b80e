"""Parallel decode and encode of diffusers VAEs over the ranks of a context group."""

from lightning_cp.undoable import Undo
from lightning_cp.vae.parallel import parallelize_vae

__all__ = ["Undo", "parallelize_vae"]
