"""Public names of `lightning_cp.finetune.objectives`."""

from lightning_cp.finetune.objectives import *  # noqa: F403
from lightning_cp.finetune.objectives import __all__ as __all__
