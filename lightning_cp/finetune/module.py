"""A LightningModule that fine-tunes a pretrained transformer on stored samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.data import bucket_loader
from lightning_cp.families import Family, StoredBatch
from lightning_cp.finetune.validation import Validation
from lightning_cp.objectives import Objective, objective_for
from lightning_cp.training.ranks import DataShard, TrainerRanks

_BATCHES = "lightning_cp.batches"


class _OneStep(list[int]):
    """A validation loader of one step, which validates everything: `Validation` shares the samples between ranks."""

    sharded_by_data_rank = True  # the strategies otherwise refuse a loader that they cannot shard

    def __init__(self) -> None:
        super().__init__([0])


class FineTuning(LightningModule):
    """Fine-tune a transformer on stored samples, alone or with a strategy of lightning_cp.

    Logs "loss" and, in Lightning's validation, "val_loss". Noise, times and the order of the data depend on the seed
    and the number of batches only, so a run that is resumed at another number of ranks continues exactly. Checkpoints
    hold the weights that are trained.

    Args:
        transformer: diffusers transformer, with or without adapters (`add_lora`).
        family: model family, from `LatentCache.family` or `family_for`.
        objective: None: the family's, with seed 0.
        optimizer: builds the optimizer from the parameters that require gradients; None: AdamW with lr=1e-4.
        data: data set such as `LatentData`; None: give Trainer.fit a loader.
        batch_size: global batch size, with `data`.
        num_workers: workers of the loader of `data`.
        held_out: data set of the samples for validation.
        quantiles: quantiles of the timestep density for validation.
    """

    def __init__(
        self,
        transformer: nn.Module,
        family: Family,
        *,
        objective: Objective | None = None,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        data: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        held_out: Any = None,
        quantiles: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    ) -> None:
        super().__init__()
        self.strict_loading = False  # frozen weights are not in checkpoints
        self.transformer, self.family = transformer, family
        self.objective = objective or objective_for(family, seed=0)
        self.batches = 0
        self._optimizer, self._quantiles = optimizer, tuple(quantiles)
        self._data, self._batch_size, self._num_workers, self._held_out = data, batch_size, num_workers, held_out

    @override
    def training_step(self, batch: StoredBatch, batch_idx: int) -> Tensor:
        loss = self.objective.loss(self.transformer, self.family, batch, step=self.batches)
        self.batches += 1
        self.log("loss", loss, prog_bar=True, batch_size=len(batch), sync_dist=True)  # the mean over data ranks
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Validate all held-out samples at once; see `Validation`."""
        validation = Validation(self._held_out, self.family, self.objective, quantiles=self._quantiles)
        shard = DataShard.of(self.trainer.strategy)
        result = validation.losses(self.transformer, TrainerRanks(self.trainer), shard)
        self.log("val_loss", result.loss, prog_bar=True, batch_size=1)
        return torch.tensor(result.loss)

    @override
    def configure_optimizers(self) -> Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return AdamW(trained, lr=1e-4) if self._optimizer is None else self._optimizer(trained)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        if self._data is None:
            raise ValueError("FineTuning needs data: pass data=..., or a loader to Trainer.fit")
        strategy: Any = self.trainer.strategy
        has_data_ranks = hasattr(strategy, "data_rank")
        if not has_data_ranks and self.trainer.world_size > 1:
            raise ValueError(
                f"FineTuning(data=...) cannot share data between the {self.trainer.world_size} ranks of "
                f"{type(strategy).__name__}: use lightning_cp.pytorch.ContextParallelStrategy (ring=1 is data "
                "parallelism), or give Trainer.fit a loader"
            )
        return bucket_loader(
            self._data,
            batch_size=self._batch_size,
            ranks=strategy if has_data_ranks else None,
            seed=self.objective.seed,
            with_epoch=True,
            start_step=self.batches,
            num_workers=self._num_workers,
        )

    @override
    def val_dataloader(self) -> Any:
        return [] if self._held_out is None else _OneStep()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_BATCHES] = self.batches
        frozen = {name for name, p in self.named_parameters() if not p.requires_grad}
        state = checkpoint.get("state_dict")
        if isinstance(state, dict):
            checkpoint["state_dict"] = {name: x for name, x in state.items() if name not in frozen}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches = int(checkpoint[_BATCHES])
