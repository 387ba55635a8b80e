"""Public names of `lightning_cp.finetune.precompute`."""

from lightning_cp.finetune.precompute import *  # noqa: F403
from lightning_cp.finetune.precompute import __all__ as __all__
