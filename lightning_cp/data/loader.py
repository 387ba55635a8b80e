"""Load an endless sequence of batches with a DataLoader."""

import traceback
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_cp.data.sampler import EndlessBatches
from lightning_cp.errors import DataError


class EndlessLoader(DataLoader[Any]):
    """An endless DataLoader: the end of iteration is an error, not the end of training.

    A loop over a DataLoader ends on StopIteration, also when a data set raises it by mistake (`next` without a
    default, perhaps in a worker). Training would then end on one rank while the other ranks wait for it.

    With `EndlessBatches` as batch sampler, each iteration continues after the last batch that the previous one
    returned, also if workers had prefetched more, unless the sampler's position was set in between. Lightning's Trainer
    starts a new iteration in each of its epochs (`limit_train_batches`).

    Raises: DataError: the batches have ended.
    """

    _next_step: int | None = None  # after the batches returned so far

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first = self._place_sampler()
        batches = super().__iter__()
        count = 0
        while True:
            try:
                batch = next(batches)
            except StopIteration as end:
                raise DataError(f"the data loader ended after {count} batches of this run: {_cause(end)}") from end
            count += 1
            self._next_step = first + count
            yield batch

    def _place_sampler(self) -> int:
        """Set the sampler to the next batch. Returns: its step; 0 for a sampler without steps."""
        if not isinstance(self.batch_sampler, EndlessBatches):
            return 0
        sampler = self.batch_sampler.order_sampler
        if not sampler.take_user_position() and self._next_step is not None:
            sampler.seek(self._next_step)
            sampler.take_user_position()
        return int(sampler.state_dict()["step"])


def _cause(end: StopIteration) -> str:
    """Describe the place where StopIteration was raised, and the fix."""
    frame = traceback.extract_tb(end.__traceback__)[-1]
    origin = f"StopIteration was raised in {frame.name}, {frame.filename}:{frame.lineno}"
    if isinstance(end.value, str) and end.value.startswith("Caught StopIteration"):  # worker traceback, as text
        lines = [line.strip() for line in end.value.splitlines() if line.strip().startswith("File ")]
        origin = f"StopIteration was raised in a worker: {lines[-1]}"
    return f"{origin}; the data set must return a sample for every index, and its sampler must not end"
