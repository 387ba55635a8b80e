"""Public names of `lightning_cp.finetune.families`."""

from lightning_cp.finetune.families import *  # noqa: F403
from lightning_cp.finetune.families import __all__ as __all__
