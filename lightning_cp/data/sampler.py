"""Define one data order for every strategy, and each data rank's slice of it."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler
from typing_extensions import override

from lightning_cp.data.keyed_random import RandomStream, keyed_generator


class GlobalBatchSampler(Sampler[list[int]]):
    """Yield this data rank's contiguous slice of each global batch.

    The global batches depend only on (seed, epoch), so training sees the same samples at every degree of parallelism:
    one process, eight context ranks, or eight data ranks. An incomplete last batch is dropped. Pass the sampler to a
    DataLoader as `batch_sampler`; all ranks of a context group use the same `data_rank`.

    Args:
        num_samples: number of samples in the data set.
        batch_size: global batch size, over all data ranks.
        seed: seed of the order.
        shuffle: True for a random order in each epoch, False for index order.
        data_rank: index of this rank's context group (`strategy.data_rank`).
        data_size: number of context groups (`strategy.data_size`).
    Raises: ValueError: batch_size exceeds num_samples or is not a multiple of data_size, or data_rank is out of range.

    Examples:
        >>> [batch for batch in GlobalBatchSampler(7, 4, shuffle=False, data_rank=1, data_size=2)]
        [[2, 3]]
    """

    sharded_by_data_rank = True

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        data_rank: int = 0,
        data_size: int = 1,
    ) -> None:
        if data_size < 1 or not 0 <= data_rank < data_size:
            raise ValueError(f"data_rank={data_rank} must be from 0 to data_size - 1, with data_size={data_size} >= 1")
        if not 1 <= batch_size <= num_samples:
            raise ValueError(f"batch_size={batch_size} must be from 1 to the {num_samples} samples of the data set")
        if batch_size % data_size:
            raise ValueError(
                f"batch_size={batch_size} is the global batch and must be a multiple of data_parallel={data_size}"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.data_rank = data_rank
        self.data_size = data_size
        self._epoch = 0
        self._start = 0  # first batch of the next iteration
        self._yielded = 0  # batches of this epoch yielded so far

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return self.num_samples // self.batch_size

    @property
    def first_index(self) -> int:
        """Global batch index of this data rank's first sample."""
        return self.data_rank * (self.batch_size // self.data_size)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        size = self.batch_size // self.data_size
        start, self._start = self._start, 0
        for batch in range(start, len(self)):
            first = batch * self.batch_size + self.first_index
            self._yielded = batch + 1
            yield order[first : first + size]

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch's order; the next iteration begins with its first batch."""
        self._epoch, self._start, self._yielded = epoch, 0, 0

    def seek(self, step: int) -> None:
        """Start the next iteration at the batch of this step, counted from 0 over all epochs."""
        self._epoch, self._start = divmod(step, len(self))
        self._yielded = self._start

    @property
    def epoch(self) -> int:
        """Current epoch, counted from 0."""
        return self._epoch

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position in the data order.

        Args:
            step: number of consumed batches over all epochs. None: number of yielded batches, which is too high when
                DataLoader workers prefetch.
        """
        position = self._epoch * len(self) + self._yielded if step is None else step
        return {
            "step": position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of a `state_dict`, at any data-parallel degree.

        Raises: ValueError: the order differs (seed, shuffle, batch size or number of samples changed).
        """
        for name in ("seed", "shuffle", "batch_size", "num_samples"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)} differs from the checkpoint's {name}={state[name]}: "
                    "the data order cannot be continued; use the checkpoint's value or start a new run"
                )
        self.seek(int(state["step"]))

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = keyed_generator(self.seed, RandomStream.ORDER, step=self._epoch)
        return [int(index) for index in generator.permutation(self.num_samples)]


class EndlessBatches(Sampler[list[int]]):
    """Yield the batches of a `GlobalBatchSampler` from its current position, epoch after epoch, without end."""

    sharded_by_data_rank = True

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler

    @override
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self._sampler
            self._sampler.set_epoch(self._sampler.epoch + 1)
