"""Load an endless sequence of batches with a DataLoader."""

import traceback
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_cp.errors import DataError


class EndlessLoader(DataLoader[Any]):
    """An endless DataLoader: the end of iteration is an error, not the end of training.

    A loop over a DataLoader ends on StopIteration, also when a data set raises it by mistake (`next` without a
    default, perhaps in a worker). Training would then end on one rank while the other ranks wait for it.

    Raises: DataError: the batches have ended.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        count = 0
        while True:
            try:
                batch = next(batches)
            except StopIteration as end:
                raise DataError(f"the data loader ended after {count} batches of this run: {_cause(end)}") from end
            count += 1
            yield batch


def _cause(end: StopIteration) -> str:
    """Describe the place where StopIteration was raised, and the fix."""
    frame = traceback.extract_tb(end.__traceback__)[-1]
    origin = f"StopIteration was raised in {frame.name}, {frame.filename}:{frame.lineno}"
    if isinstance(end.value, str) and end.value.startswith("Caught StopIteration"):  # worker traceback, as text
        lines = [line.strip() for line in end.value.splitlines() if line.strip().startswith("File ")]
        origin = f"StopIteration was raised in a worker: {lines[-1]}"
    return f"{origin}; the data set must return a sample for every index, and its sampler must not end"
