"""Keep samplers that the Trainer need not or cannot divide, and count the batches that its loops take."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_cp.data.peer_batches import is_custom


class _RequiresSampler:
    """Replacement of Lightning's method that decides whether a loader gets a distributed sampler."""

    def __init__(self, original: Any, data_size: int) -> None:
        self.original, self.data_size = original, data_size

    def __call__(self, dataloader: DataLoader[Any]) -> bool:
        return self.data_size > 1 and not is_custom(dataloader.batch_sampler) and bool(self.original(dataloader))


def keep_samplers(trainer: Trainer, *, data_size: int) -> bool:
    """Keep the user's samplers with one data group, and batch samplers that Lightning cannot divide with several.

    With a distributed sampler, the Trainer would shuffle training data even if the user sets `shuffle=False`.

    Returns: whether the Trainer divides data (`use_distributed_sampler`).
    """
    connector: Any = trainer._data_connector
    original = connector._requires_distributed_sampler
    if isinstance(original, _RequiresSampler):
        original = original.original
    connector._requires_distributed_sampler = _RequiresSampler(original, data_size)
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def batches_taken(trainer: Trainer, length: int) -> int:
    """Return the number of batches that the Trainer's current loop takes from a loader of this length."""
    stage = trainer.state.stage
    limit = getattr(trainer, f"limit_{stage.dataloader_prefix}_batches") if stage is not None else 1.0
    if trainer.sanity_checking:
        length = int(min(length, trainer.num_sanity_val_steps))
    return int(length * limit) if isinstance(limit, float) else min(length, limit)
