"""Base class of samplers that wrap another sampler and change its order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Sampler


class WrappedSampler(Sampler[Any]):
    """Behave like the wrapped sampler; subclasses override parts of it.

    Args: order: a sampler of indices, or a batch sampler.
    """

    def __init__(self, order: Iterable[Any]) -> None:
        self.order = order

    def __len__(self) -> int:
        """Length of the wrapped sampler. Raises: TypeError: it has no length."""
        count: int = len(self.order)  # type: ignore[arg-type]
        return count

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes on the wrapped sampler: `set_epoch`, `batch_size`, `state_dict`."""
        if name.startswith("__") or name == "order":
            raise AttributeError(name)
        return getattr(self.order, name)
