"""Train with Lightning's Trainer and a LightningModule; the same run as in `with_fabric`."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.checkpoint import parse_manifest
from lightning_cp.finetune.families import StoredBatch
from lightning_cp.finetune.module import FineTuning
from lightning_cp.finetune.objectives import MicroBatch
from lightning_cp.finetune.objectives.divided_batch import DividedBatch
from lightning_cp.launch.channel import StopRequest
from lightning_cp.recipes.training.loop import Steps
from lightning_cp.recipes.training.precision import WithPrecision
from lightning_cp.recipes.training.run import Run, check_is_done, quiet_lightning
from lightning_cp.recipes.training.setup import TrainingSetup
from lightning_cp.training.ranks import DataShard, TrainerRanks


class RecipeModule(FineTuning):
    """`FineTuning`, with the recipe's data, logging and checkpoints instead of the Trainer's.

    Args:
        setup: data and objective of the run.
        stack: exit stack that closes after the fit.
        after_step, at_end: see `fit_model`.
    """

    run: Run
    steps: Steps

    def __init__(
        self, setup: TrainingSetup, stack: ExitStack, after_step: Callable[[Run], None], at_end: Callable[[Run], None]
    ) -> None:
        super().__init__(**setup.module_settings())
        self._setup, self._stack, self._after_step, self._at_end = setup, stack, after_step, at_end
        self._request = StopRequest()

    @override
    def on_fit_start(self) -> None:
        trainer = self.trainer
        data_shard = DataShard.of(trainer.strategy)
        self.run = self._setup.start(
            TrainerRanks(trainer),
            data_shard,
            self._setup.sampler(trainer.strategy),
            tuning=self,
            model=WithPrecision(self.transformer, trainer.precision_plugin),
            module=self.transformer,
            optimizer=trainer.optimizers[0],
            request=self._request,
        )
        self.batches = self.run.state.step
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.steps = self._setup.steps(self.run, self._stack, scaler=scaler, after_step=self._after_step)
        if self.steps.are_done:
            self.on_train_start()
            self._setup.finish(self.run)
            self._at_end(self.run)  # the Trainer calls no training hooks if no steps are left

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._setup.loader(self.run.state.sampler, self.run.data_shard)

    @override
    def on_train_start(self) -> None:
        self._stack.enter_context(self._request)  # only now: Lightning sets its own signal handlers before this

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.steps.begin()

    @override
    def micro_batches(
        self, batch: StoredBatch | DividedBatch, *, step: int, first_index: int | None = None
    ) -> Iterator[MicroBatch]:
        return super().micro_batches(batch, step=step, first_index=self.run.state.sampler.first_index)

    @override
    def report(self, loss: Tensor, sigma: Tensor, *, samples: int) -> None:
        """Give the means to `Steps`, which logs them."""
        self.steps.add(loss, sigma)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        assert gradient_clip_val is not None, "the recipe's configuration gives it"
        self.steps.before_update(max_norm=gradient_clip_val)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.run.state.optimizer.zero_grad()
        self.steps.end()

    @override
    def on_train_end(self) -> None:
        check_is_done(self.run, self._setup.config.max_steps)
        self._setup.finish(self.run)
        self._at_end(self.run)


def fit_with_trainer(
    config: DictConfig,
    build: Callable[[DictConfig], TrainingSetup],
    after_step: Callable[[Run], None],
    at_end: Callable[[Run], None],
) -> None:
    """Train with Lightning's Trainer; see `fit_model`."""
    done = 0 if config.resume is None else parse_manifest(Path(config.resume)).step
    seed_everything(config.seed, verbose=False)
    with ExitStack() as stack, quiet_lightning(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*LeafSpec.*")
        trainer: Trainer = instantiate(config.trainer, max_steps=config.max_steps - done)
        trainer.fit(RecipeModule(build(config), stack, after_step, at_end))
