"""Public names of `lightning_cp.finetune.latent_cache`."""

from lightning_cp.finetune.latent_cache import *  # noqa: F403
from lightning_cp.finetune.latent_cache import __all__ as __all__
