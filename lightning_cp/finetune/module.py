"""A LightningModule that fine-tunes a pretrained transformer on stored samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.data import bucket_loader
from lightning_cp.engine.paths import class_of
from lightning_cp.export import diffusers_model_of, on_rank_zero, save_lora, save_pretrained
from lightning_cp.finetune.adapters.comfyui import COMFYUI_FILE, write_for_comfyui
from lightning_cp.finetune.adapters.lora import scale_second_matrices
from lightning_cp.finetune.data import divided_loader, needs_division, set_degree
from lightning_cp.finetune.experts import Experts, experts_in, named_transformers
from lightning_cp.finetune.families import Family, StoredBatch
from lightning_cp.finetune.objectives import ExpertFlowMatching, MicroBatch, Objective, micro_batches, objective_for
from lightning_cp.finetune.objectives.micro_batch import DividedBatch
from lightning_cp.finetune.side import trained_model
from lightning_cp.finetune.validation import Validation, ValidationResult
from lightning_cp.training.modes import without_cudnn_attention
from lightning_cp.training.ranks import DataShard, Ranks, TrainerRanks

LORA = "lora"  # folder of an adapter
_BATCHES = "lightning_cp.batches"


class _Steps(list[int]):
    """A validation loader of one step or none. The step validates all samples: `Validation` divides them over ranks."""

    sharded_by_data_rank = True  # the strategies otherwise refuse a loader that they cannot shard

    def __init__(self, count: int) -> None:
        super().__init__(range(count))


class FineTuning(LightningModule):
    """Fine-tune a transformer on stored samples, alone or with a strategy of lightning_cp.

    `lightning-cp train` trains this module, with a Trainer or, by calling its methods, with Fabric.

    Logs "loss" (of an expert also "loss_<its name>"), "sigma" (the mean noise level) and, in Lightning's validation,
    "val_loss". Noise, times and the order of the data depend on the seed and the number of batches only, so a run that
    is resumed at another number of ranks continues exactly. Checkpoints hold the weights that are trained.

    Args:
        transformer: diffusers transformer, with or without adapters (`add_lora`), or a `SteeredTransformer`. A mapping:
            the experts of a pipeline, by their names in it; each step trains the one that the objective draws, see
            `ExpertFlowMatching`.
        family: model family, from `LatentCache.family` or `family_for`.
        objective: None: the family's for these components, with seed 0; see `objective_for`.
        optimizer: builds the optimizer from the parameters that require gradients; None: AdamW with lr=1e-4.
        data: data set such as `LatentData`; None: give Trainer.fit a loader.
        batch_size: global batch size, with `data`.
        mixed: batches of `data` hold samples of all sizes, see `divided_loader`; False: samples of one size.
        micro_batch_size: gradient accumulation: number of samples that a rank passes through the transformer at once;
            None: all of its samples. Losses and weights do not depend on it, unlike with Lightning's
            `accumulate_grad_batches`.
        num_workers: workers of the loader of `data`.
        held_out: data set of the samples for validation.
        quantiles: quantiles of the timestep density for validation.
        component: name of the trained model in its pipeline, for the objective and `export`; not for experts.
        lora_lr_ratio: LoRA+ (arXiv:2402.12354): learning rate of the matrices `lora_B`, divided by that of `lora_A`;
            None: they have the same.
    Raises: ValueError: `micro_batch_size` or `lora_lr_ratio` is not valid; experts without an objective for them, or
        the other way round.
    """

    def __init__(
        self,
        transformer: nn.Module | Mapping[str, nn.Module],
        family: Family,
        *,
        objective: Objective | None = None,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        data: Any = None,
        batch_size: int = 1,
        mixed: bool = False,
        micro_batch_size: int | None = None,
        num_workers: int = 0,
        held_out: Any = None,
        quantiles: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
        component: str = "transformer",
        lora_lr_ratio: float | None = None,
    ) -> None:
        super().__init__()
        self.strict_loading = False  # frozen weights are not in checkpoints
        self.family = family
        self.transformer: nn.Module = transformer if isinstance(transformer, nn.Module) else Experts(transformer)
        names = list(named_transformers(self.transformer, component))
        self.objective = objective or objective_for(family, seed=0, component=names if len(names) > 1 else component)
        drawn = sorted(self.objective.ranges) if isinstance(self.objective, ExpertFlowMatching) else []
        if drawn != (sorted(names) if len(names) > 1 else []):
            raise ValueError(f"the objective is for the experts {drawn}, but the transformers are {names}")
        self.batches, self.component = 0, component
        self._optimizer, self._quantiles = optimizer, tuple(quantiles)
        self._data, self._batch_size, self._num_workers, self._held_out = data, batch_size, num_workers, held_out
        self._mixed = mixed
        self._micro_batch_size, self._has_gradients = micro_batch_size, False
        self._is_last = True  # whether the next backward is the last one of its step
        self._lora_lr_ratio = lora_lr_ratio
        if lora_lr_ratio is not None and not 0 < lora_lr_ratio < math.inf:
            raise ValueError(f"lora_lr_ratio={lora_lr_ratio} must be a positive number, or None")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1, or None")

    @override
    def training_step(self, batch: StoredBatch | DividedBatch, batch_idx: int) -> Tensor:
        set_degree(batch, self.trainer.strategy)
        *others, last = self.micro_batches(batch, step=self.batches)
        self._has_gradients = bool(others)
        is_divided = isinstance(batch, DividedBatch)
        if others or is_divided or self.expert is not None:
            self._check_accumulation()
        if others:
            for optimizer in self.trainer.optimizers:
                optimizer.zero_grad()
        values, self._is_last = [], False
        with without_cudnn_attention():
            for part in others:  # DDP averages gradients in the Trainer's backward only, which follows the last forward
                values.append(self.loss(part))
                self.trainer.strategy.backward(values[-1][0], None)
            values.append(self.loss(last))
        self.batches += 1
        loss, sigma = (torch.stack([x.detach() for x in parts]).sum() for parts in zip(*values, strict=True))
        self.report(loss, sigma, samples=1 if is_divided else len(batch))  # ranks may have different numbers of samples
        self._is_last = True
        return values[-1][0]

    def micro_batches(
        self, batch: StoredBatch | DividedBatch, *, step: int, first_index: int | None = None
    ) -> Iterator[MicroBatch]:
        """Divide this rank's batch for gradient accumulation. Of experts, select the one that the step trains.

        Args:
            step: number of batches trained before it.
            first_index: see `Objective.loss`.
        """
        if isinstance(self.objective, ExpertFlowMatching):
            self._experts.select(self.objective.expert_at(step))
        first = first_index or 0
        if first_index is None and isinstance(batch, StoredBatch):
            first = self.objective.first_index(self.transformer, batch)
        size = self._micro_batch_size
        return micro_batches(self.objective, self.family, batch, size=size, step=step, first_index=first)

    @property
    def expert(self) -> str | None:
        """Name of the expert that the last step has trained; None without experts."""
        return self._experts.active if isinstance(self.objective, ExpertFlowMatching) else None

    @property
    def idle_weights(self) -> tuple[str, ...]:
        """Beginnings of the names of the parameters that the last step has not trained."""
        if not isinstance(self.objective, ExpertFlowMatching):
            return ()
        return tuple(f"transformer.{name}" for name in self._experts.idle)

    @property
    def _experts(self) -> Experts:
        experts = experts_in(self.transformer)
        assert experts is not None, "checked in __init__"
        return experts

    def report(self, loss: Tensor, sigma: Tensor, *, samples: int) -> None:
        """Log the means of this rank's batch, averaged over the data ranks."""
        of_expert = [] if self.expert is None else [(f"loss_{self.expert}", loss)]
        for name, mean in (("loss", loss), ("sigma", sigma), *of_expert):
            self.log(name, mean, prog_bar=name == "loss", batch_size=samples, sync_dist=True)

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Zero the gradients, unless `training_step` did it: the Trainer calls this between that and the backward."""
        if not self._has_gradients:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def loss(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return loss and mean sigma of a micro-batch, multiplied by its `share`. Override it to change the loss."""
        return part.loss(self.transformer)

    def _check_accumulation(self) -> None:
        number = self.trainer.accumulate_grad_batches
        if number != 1 and self.expert is not None:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={number}) would join batches of different experts in one step: use "
                "micro_batch_size, which divides the batch of one"
            )
        if number != 1:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={number}) does not work with micro_batch_size="
                f"{self._micro_batch_size} or with divided batches: leave one of them out"
            )

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with without_cudnn_attention():  # as in the forward: activation checkpointing repeats it
            super().backward(loss, *args, **kwargs)

    @override
    def on_after_backward(self) -> None:
        if self._is_last:
            set_degree(None, self.trainer.strategy)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Validate all held-out samples at once."""
        result = self.validate(TrainerRanks(self.trainer), DataShard.of(self.trainer.strategy))
        self.log("val_loss", result.loss, prog_bar=True, batch_size=1)
        return torch.tensor(result.loss)

    def validate(self, ranks: Ranks, data_shard: DataShard) -> ValidationResult:
        """Return the losses of the held-out samples with the current weights. Call it on every rank.

        Args: see `Validation.losses`.
        """
        validation = Validation(self._held_out, self.family, self.objective, quantiles=self._quantiles)
        precision: AbstractContextManager[Any] = nullcontext()
        if isinstance(ranks, TrainerRanks):  # Fabric's module applies the precision itself
            precision = ranks.trainer.precision_plugin.forward_context()
        with precision:
            return validation.losses(self.transformer, ranks, data_shard)

    def export(self, folder: str | Path) -> Path:
        """Write the trained weights for plain diffusers, and a LoRA for ComfyUI, too. Call it on every rank.

        To export EMA weights, call it inside `EMACallback.averaged` or `WeightAverage.swapped_in`.

        Returns: the folder of the files: `folder/lora`, or `folder/<component>` without adapters, that of the first
            expert if there are several.
        Raises: ExportError, on every rank: the first rank could not write. Older files are then complete.
        """
        transformers = named_transformers(trained_model(self.transformer), self.component)
        models: dict[str, Any] = {name: diffusers_model_of(x) for name, x in transformers.items()}
        if not any(getattr(model, "peft_config", None) for model in models.values()):
            for name, transformer in transformers.items():
                save_pretrained(transformer, Path(folder) / name)
            return Path(folder) / next(iter(transformers))
        lora = Path(folder) / LORA
        files = {name: COMFYUI_FILE if len(models) == 1 else f"comfyui_{name}.safetensors" for name in models}
        for file in files.values():
            on_rank_zero(partial((lora / file).unlink, missing_ok=True))  # it would not fit a new LoRA after a kill
        save_lora(transformers, lora)
        for name, file in files.items():
            adapter = next(iter(models[name].peft_config.values()))
            if getattr(adapter, "use_dora", True) or adapter.rank_pattern:  # LoKr has no use_dora
                continue  # `write_for_comfyui` knows a LoRA of one rank
            kind = class_of(models[name]).__name__
            on_rank_zero(partial(write_for_comfyui, lora, kind, component=name, file=file))
        return lora

    @override
    def configure_optimizers(self) -> Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = AdamW(trained, lr=1e-4) if self._optimizer is None else self._optimizer(trained)
        if self._lora_lr_ratio is not None:
            scale_second_matrices(optimizer, self, self._lora_lr_ratio)
        return optimizer

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
        settings: dict[str, Any] = {
            "batch_size": self._batch_size,
            "ranks": strategy if has_data_ranks else None,
            "seed": self.objective.seed,
            "start_step": self.batches,
            "num_workers": self._num_workers,
        }
        if self._mixed or needs_division(self._data, settings["ranks"]):
            part_size = 1 if self.family.one_per_call else self._micro_batch_size
            return divided_loader(self._data, mixed=self._mixed, micro_batch_size=part_size, **settings)
        return bucket_loader(self._data, with_epoch=True, **settings)

    @override
    def val_dataloader(self) -> list[int]:
        return _Steps(0 if self._held_out is None else 1)

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
