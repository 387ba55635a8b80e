"""Write a run's checkpoints: full or distributed, blocking or in the background."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from lightning_cp.checkpoint.manifest import CHECKPOINT_FORMATS
from lightning_cp.checkpoint.shards import save_shards, save_shards_in_background
from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint, save_checkpoint_in_background


class CheckpointWriter:
    """Write the checkpoints of a run. Create one on every rank; leaving its context waits for a pending write.

    Args:
        parent: the run's folder of checkpoints.
        format: `full`: rank 0 writes whole tensors; `distributed`: every rank writes its shards (torch DCP).
        in_background: `save` copies the tensors and returns; a thread writes them, one checkpoint at a time.
        keep: number of newest checkpoints to keep; None: all.
        is_first: True on rank 0.
    Ranks: the whole world, for `distributed` with `in_background`.
    """

    def __init__(
        self,
        parent: Path,
        *,
        format: str = "full",
        in_background: bool = False,
        keep: int | None = None,
        is_first: bool = True,
    ) -> None:
        if format not in CHECKPOINT_FORMATS:
            raise ValueError(f"format={format} is not valid: must be one of {', '.join(CHECKPOINT_FORMATS)}")
        self.is_distributed = format == "distributed"
        self._parent, self._keep, self._in_background, self._is_first = parent, keep, in_background, is_first
        self._worker: ThreadPoolExecutor | None = None
        self._group: dist.ProcessGroup | None = None
        self._pending: Callable[[], object] | None = None
        if in_background and self.is_distributed and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # separate from training's collectives
        if in_background and not self.is_distributed:
            self._worker = ThreadPoolExecutor(1, "checkpoint")

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint. Call it on every rank, with DTensors if `is_distributed`, otherwise with whole tensors.

        Raises: OSError: this checkpoint, or the previous background write, failed.
        """
        self.wait()
        if self.is_distributed and self._in_background:
            self._pending = save_shards_in_background(self._parent, checkpoint, self._group, keep=self._keep)
        elif self.is_distributed:
            save_shards(self._parent, checkpoint, keep=self._keep)
        elif self._is_first and self._worker is not None:
            self._pending = save_checkpoint_in_background(
                self._parent, checkpoint, self._worker, keep=self._keep
            ).result
        elif self._is_first:
            save_checkpoint(self._parent, checkpoint, keep=self._keep)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises: OSError: it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.wait()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
