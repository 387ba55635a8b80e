"""Keep the Trainer from replacing samplers if there is one data group, or if it cannot divide them."""

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
