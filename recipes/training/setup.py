"""Build the parts of a run from a composed configuration."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning.fabric.loggers.logger import Logger
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_cp.checkpoint.store import CheckpointWriter
from lightning_cp.data import EndlessBatches, EndlessLoader
from lightning_cp.data.divided_sampler import DividedBatchSampler
from lightning_cp.data.random_state import seeds_of_loader
from lightning_cp.data.sampler import OrderSampler
from lightning_cp.engine.recompute import checkpoint_blocks
from lightning_cp.finetune.data import DividedData
from lightning_cp.finetune.families import Family, StoredBatch
from lightning_cp.finetune.module import FineTuning
from lightning_cp.finetune.objectives import Objective
from lightning_cp.launch.channel import StopRequest
from lightning_cp.recipes.settings.world import shards_weights
from lightning_cp.recipes.terminal import printable
from lightning_cp.recipes.training.loop import Schedule, Steps, StepTrace, Watcher
from lightning_cp.recipes.training.records import LoggedMetrics, MetricsFile, ProgressBar
from lightning_cp.recipes.training.run import Run, check_same_checkpoint, open_run_folder
from lightning_cp.recipes.training.state import TrainState
from lightning_cp.training.ema import WeightAverage
from lightning_cp.training.finite import StepGuard
from lightning_cp.training.ranks import DataShard, Ranks


@dataclass(frozen=True)
class TrainingSetup(ABC):
    """The model, data and objective of a configuration; builds optimizer, loader and run on the ranks.

    Args:
        config: resolved configuration of a recipe.
        dataset: the whole data set.
        family: family of the model: encodes the data and builds the model's arguments.
        objective: training objective.
    """

    config: DictConfig
    dataset: Any
    family: Family
    objective: Objective

    def module_settings(self) -> dict[str, Any]:
        """Build the model; return it and the other arguments of `FineTuning`, which the run trains."""
        return {
            "transformer": self.denoiser(),
            "family": self.family,
            "objective": self.objective,
            "optimizer": self.optimizer,
            "micro_batch_size": self.config.micro_batch_size,
        }

    def collate(self, samples: list[Any]) -> StoredBatch:
        """Join samples of the data set to a batch."""
        batch: StoredBatch = self.dataset.collate(samples)
        return batch

    @property
    def shards_weights(self) -> bool:
        """True if weights and gradients are sharded over ranks: no rank holds the whole model."""
        return shards_weights(self.config)

    @abstractmethod
    def denoiser(self) -> nn.Module:
        """Build the model to train; new weights are drawn from torch's global generator."""

    @abstractmethod
    def sampler(self, strategy: Any) -> OrderSampler:
        """Build the sampler of this data rank's share of each batch. Args: strategy: it has the data ranks."""

    @property
    def base(self) -> str | None:
        """Description of the frozen weights, see `TrainState`."""
        return None

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens per sample, on average, for tokens/s."""

    def validate(self, run: Run) -> float | None:
        """Return the validation loss, if it is due after this step. Call it on every rank. Default: None."""
        return None

    def export(self, run: Run) -> None:  # noqa: B027
        """Export what the run has trained so far. Call it on every rank; see `save_every`. Default: nothing."""

    def finish(self, run: Run) -> None:  # noqa: B027
        """Export what the run trained. Call it on every rank at the end. Default: nothing."""

    def checkpointed(self, transformer: Any) -> None:
        """Enable the activation checkpointing of the settings."""
        checkpoint_blocks(transformer, self.config.activation_checkpointing)

    def optimizer(self, trained: list[nn.Parameter]) -> Optimizer:
        """Build the optimizer of the parameters that are trained."""
        built: Optimizer = instantiate(self.config.optim, params=trained, _convert_="all")  # plain lists, for its state
        return built

    def loader(self, sampler: OrderSampler, data_shard: DataShard) -> DataLoader[Any]:
        """Build an endless loader that starts at the sampler's position."""
        divided = DividedData(self.dataset) if isinstance(sampler, DividedBatchSampler) else None
        return EndlessLoader(
            divided or self.dataset,
            collate_fn=divided.collate if divided else self.collate,
            batch_sampler=EndlessBatches(sampler),
            num_workers=self.config.num_workers,
            **seeds_of_loader(self.config.seed, data_shard.rank),
        )

    def start(
        self,
        ranks: Ranks,
        data_shard: DataShard,
        sampler: OrderSampler,
        *,
        tuning: FineTuning,
        model: nn.Module,
        module: nn.Module,
        optimizer: Optimizer,
        request: StopRequest,
    ) -> Run:
        """Create the run, and resume it if `resume` is set. Call it on every rank; see `Run` and `TrainState`."""
        size, first_size = len(self.dataset), ranks.broadcast(len(self.dataset))
        if size != first_size:
            raise ValueError(
                f"the data set has {size} samples on rank {ranks.global_rank}, but {first_size} on rank 0: it must be "
                "the same on all ranks"
            )
        folder = open_run_folder(ranks, self.config.run_dir)
        average = WeightAverage(module, self.config.ema_decay)
        state = TrainState(model, module, optimizer, average, sampler, self.config.seed, self.base)
        check_same_checkpoint(ranks, self.config.resume)
        if self.config.resume is not None:
            state.load(Path(self.config.resume), verify=False)  # the launcher verified it when it found it
            if ranks.is_global_zero:
                print(printable(f"Resuming after step {state.step} from {self.config.resume}"), flush=True)
        logger = self._logger() if ranks.is_global_zero else None
        return Run(ranks, state, tuning, folder, data_shard, request, logger)

    def _logger(self) -> Logger | None:
        """Build the logger of the settings; None with logger=csv."""
        settings = self.config.logger
        if settings is None or settings._target_ is None:
            return None
        logger: Logger = instantiate(settings)
        values: Any = OmegaConf.to_container(self.config)
        logger.log_hyperparams(values)
        return logger

    def steps(
        self,
        run: Run,
        stack: ExitStack,
        *,
        scaler: GradScaler | None = None,
        after_step: Callable[[Run], None] | None = None,
    ) -> Steps:
        """Build the loop's `Steps`; the first rank also writes metrics and shows a progress bar until `stack` closes.

        Args: scaler: gradient scaler of precision 16-mixed.
        """
        config = self.config
        lr_steps = config.lr_steps or config.max_steps
        watchers: list[Watcher] = []
        if run.is_first:
            step = run.state.step
            resumed = None if config.resume is None else Path(config.resume).parents[1] / "metrics.csv"
            metrics = MetricsFile(run.folder / "metrics.csv", resumed_at=step, resumed=resumed, every=config.log_every)
            watchers.append(stack.enter_context(metrics))
            if run.logger is not None:
                watchers.append(stack.enter_context(LoggedMetrics(run.logger, every=config.log_every)))
            if config.progress:
                watchers.append(stack.enter_context(ProgressBar(config.max_steps, start=step)))
        writer = CheckpointWriter(
            run.folder / "checkpoints", in_background=config.checkpoint_async, keep=config.keep_checkpoints
        )
        trace = StepTrace(config.trace_step, run.folder / "trace" / f"rank_{run.ranks.global_rank}.json")
        open_writer = stack.enter_context(writer)
        if after_step is not None and run.state.step == 0:
            after_step(run)
        guard = StepGuard(config.on_nonfinite, scaler)
        return Steps(
            run,
            config,
            open_writer,
            schedule=Schedule(config.lr_schedule, config.warmup_steps, lr_steps, config.lr_cycles),
            tokens=self.tokens,
            trace=trace,
            guard=guard,
            watchers=watchers,
            validate=self.validate,
            export=self.export,
            after_step=after_step,
        )
