"""Public names of `lightning_cp.finetune.media`."""

from lightning_cp.finetune.media import *  # noqa: F403
from lightning_cp.finetune.media import __all__ as __all__
