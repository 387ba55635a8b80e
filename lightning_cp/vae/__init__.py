"""VAEs of diffusers, decoded and encoded by the ranks of a context group together."""

from lightning_cp.vae.parallel import Undo, parallelize_vae

__all__ = ["Undo", "parallelize_vae"]
