"""Public names of `lightning_cp.finetune.family_check`."""

from lightning_cp.finetune.family_check import *  # noqa: F403
from lightning_cp.finetune.family_check import __all__ as __all__
