"""Write a run's checkpoints, blocking or in the background."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint, save_checkpoint_in_background


class CheckpointWriter:
    """Write the checkpoints of a run. Create one on every rank; leaving its context waits for a pending write.

    Args:
        parent: the run's folder of checkpoints.
        in_background: `save` copies the tensors and returns; a thread writes them, one checkpoint at a time.
        keep: number of newest checkpoints to keep; None: all.
    Ranks: the whole world.
    """

    def __init__(self, parent: Path, *, in_background: bool = False, keep: int | None = None) -> None:
        self._parent, self._keep, self._in_background = parent, keep, in_background
        self._group: dist.ProcessGroup | None = None
        self._pending: Callable[[], None] | None = None
        if in_background and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # separate from training's collectives

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint. Call it on every rank; tensors may be DTensors.

        Raises: OSError: this checkpoint, or the previous background write, failed.
        """
        self.wait()
        if self._in_background:
            self._pending = save_checkpoint_in_background(self._parent, checkpoint, self._group, keep=self._keep)
        else:
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
        self.wait()
