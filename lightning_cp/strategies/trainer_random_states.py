"""Save and restore random states in checkpoints of Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_cp.checkpoint import CheckpointError
from lightning_cp.data.random_state import random_states, restore_random_states
from lightning_cp.strategies.mixin import ContextParallelMixin

_KEY = "lightning_cp_random_states"


class KeepsRandomStates(ContextParallelMixin):
    """Save the random states of each data group with the optimizer states, and restore them when a fit resumes.

    Data groups draw different numbers from the start of a fit or an evaluation: until then, user code may divide data
    at random, with the seed that all ranks have. A checkpoint's states are set before the resumed fit begins. In a fit
    resumed within an epoch they are set again before the first batch, because data loading also draws numbers:
    `training_step` then draws the same numbers as without the break.
    """

    _resumed: dict[str, Any] | None = None

    @override
    def save_checkpoint(self, checkpoint: Any, filepath: Any, *args: Any, **settings: Any) -> None:
        """Save a checkpoint as Lightning does; add the random states of each data group if it has optimizer states."""
        if "optimizer_states" in checkpoint and self.context.groups is not None:
            progress = self._lightning.lightning_module.trainer.fit_loop.epoch_loop.batch_progress
            states = random_states(self.data_rank, self.data_size)
            checkpoint[_KEY] = {"groups": states, "mid_epoch": not progress.is_last_batch}
        super().save_checkpoint(checkpoint, filepath, *args, **settings)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **settings: Any) -> dict[str, Any]:
        """Load a checkpoint as Lightning does; a fit also restores its random states.

        Raises: CheckpointError: its random states are damaged.
        """
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **settings)  # type: ignore[misc]
        if self._lightning.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._resumed = loaded.get(_KEY)
            self._restore()
        return loaded

    @override
    def _share_random_state(self) -> None:
        super()._share_random_state()
        self._restore()

    def on_train_start(self) -> None:
        """Let data groups draw different noise in training."""
        super().on_train_start()  # type: ignore[misc]
        self._separate_random_states()

    def on_validation_start(self) -> None:
        """Let data groups draw different noise in validation."""
        super().on_validation_start()  # type: ignore[misc]
        self._separate_random_states()

    def on_test_start(self) -> None:
        """Let data groups draw different noise in a test."""
        super().on_test_start()  # type: ignore[misc]
        self._separate_random_states()

    def on_predict_start(self) -> None:
        """Let data groups draw different noise in prediction."""
        super().on_predict_start()  # type: ignore[misc]
        self._separate_random_states()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the random states of a checkpoint that was saved within an epoch, before the first batch."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.get("mid_epoch"):
            self._set(resumed)
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]

    def _restore(self) -> None:
        if self._resumed is not None and self.context.groups is not None:
            self._set(self._resumed)

    def _set(self, resumed: dict[str, Any]) -> None:
        try:
            restore_random_states(resumed["groups"], self.data_rank, self.data_size)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint's {_KEY} are damaged: {error}") from error
