"""A DataLoader over batches without end."""

import traceback
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_cp.errors import DataError


class EndlessLoader(DataLoader[Any]):
    """A DataLoader whose batches must not end: the end of its iteration is an error, not the end of training.

    A loop over a DataLoader ends on StopIteration, whether its sampler ends or a data set raises it by mistake (a
    `next` without a default, in a worker too). It would end on one rank alone, while the others wait for it.

    Raises: DataError: the batches have ended.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        count = 0
        while True:
            try:
                batch = next(batches)
            except StopIteration as end:
                raise DataError(f"the data ended after {count} batches of this run: {_cause(end)}") from end
            count += 1
            yield batch


def _cause(end: StopIteration) -> str:
    """Where a StopIteration was raised, and what to do."""
    place = traceback.extract_tb(end.__traceback__)[-1]
    where = f"StopIteration was raised in {place.name}, {place.filename}:{place.lineno}"
    if isinstance(end.value, str) and end.value.startswith("Caught StopIteration"):  # in a worker, which sends its text
        lines = [line.strip() for line in end.value.splitlines() if line.strip().startswith("File ")]
        where = f"StopIteration was raised in a worker: {lines[-1]}"
    return f"{where}; a data set and its sampler must give a sample for every index, without end"
