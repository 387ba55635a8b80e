"""A base for samplers that change the order of another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Sampler


class WrappedSampler(Sampler[Any]):
    """Behaves as the sampler inside, except for what a subclass changes.

    Args: order: a sampler of indices, or a batch sampler.
    """

    def __init__(self, order: Iterable[Any]) -> None:
        self.order = order

    def __len__(self) -> int:
        """Length of the sampler inside. Raises: TypeError: it has none."""
        count: int = len(self.order)  # type: ignore[arg-type]
        return count

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes on the sampler inside: `set_epoch`, `batch_size`, `state_dict`."""
        if name.startswith("__") or name == "order":
            raise AttributeError(name)
        return getattr(self.order, name)
