"""Train with Fabric and an explicit loop, or with Lightning's Trainer and a LightningModule: the same run."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.checkpoint import parse_manifest
from lightning_cp.finetune.data import set_degree
from lightning_cp.finetune.families import StoredBatch
from lightning_cp.finetune.module import FineTuning
from lightning_cp.finetune.objectives import MicroBatch
from lightning_cp.finetune.objectives.micro_batch import DividedBatch
from lightning_cp.launch.channel import StopRequest
from lightning_cp.recipes.training.loop import Steps
from lightning_cp.recipes.training.precision import WithPrecision
from lightning_cp.recipes.training.run import Run, check_is_done, quiet_lightning
from lightning_cp.recipes.training.setup import TrainingSetup
from lightning_cp.training.modes import without_cudnn_attention
from lightning_cp.training.ranks import DataShard, TrainerRanks


def fit_model(
    config: DictConfig,
    build: Callable[[DictConfig], TrainingSetup],
    *,
    after_step: Callable[[Run], None],
    at_end: Callable[[Run], None],
) -> None:
    """Train as `config.flavour` selects. Call it on every rank.

    Args:
        config: resolved configuration of a recipe.
        build: builds the model, data and objective, once the ranks are connected and seeded.
        after_step: called on every rank before the first step, when `step` is 0, and after each step.
        at_end: called on every rank, while the model is still on its training device.
    """
    fits = {"fabric": fit_with_fabric, "pytorch": fit_with_trainer}
    fits[config.flavour](config, build, after_step, at_end)


def fit_with_fabric(
    config: DictConfig,
    build: Callable[[DictConfig], TrainingSetup],
    after_step: Callable[[Run], None],
    at_end: Callable[[Run], None],
) -> None:
    """Train with Fabric; see `fit_model`."""
    fabric: Fabric = instantiate(config.trainer)
    with quiet_lightning():
        fabric.launch()
    fabric.seed_everything(config.seed, verbose=False)  # same seed on all ranks, so that they build the same weights
    setup = build(config)
    data_shard = DataShard.of(fabric.strategy)
    sampler = setup.sampler(fabric.strategy)
    loader: Any = fabric.setup_dataloaders(setup.loader(sampler, data_shard), use_distributed_sampler=False)
    tuning = FineTuning(**setup.module_settings())
    module = tuning.transformer
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*parameters on different devices.*")  # a LoRA on a base that is not loaded
        model, optimizer = fabric.setup(module, tuning.configure_optimizers())
    model.train()
    tuning.transformer = model
    with ExitStack() as stack:
        request = stack.enter_context(StopRequest())
        stack.enter_context(without_cudnn_attention())
        run = setup.start(
            fabric, data_shard, sampler, tuning=tuning, model=model, module=module, optimizer=optimizer, request=request
        )
        precision = fabric.strategy.precision
        steps = setup.steps(run, stack, scaler=getattr(precision, "scaler", None), after_step=after_step)
        for data in () if steps.are_done else loader:
            steps.begin()
            set_degree(data, fabric.strategy)
            for part in tuning.micro_batches(data, step=run.state.step, first_index=sampler.first_index):
                # sharded gradients are reduced after each micro-batch: a rank has no room for whole ones
                with fabric.no_backward_sync(model, enabled=not part.is_last and not setup.shards_weights):
                    loss, sigma = tuning.loss(part)
                    fabric.backward(steps.add(loss, sigma))
            set_degree(None, fabric.strategy)
            precision.unscale_gradients(run.state.bare_optimizer)
            steps.before_update(max_norm=config.gradient_clip_val)
            optimizer.step()
            optimizer.zero_grad()
            steps.end()
            if steps.are_done:
                break
        check_is_done(run, config.max_steps)
        setup.finish(run)
        at_end(run)


class RecipeModule(FineTuning):
    """`FineTuning`, with the data, metrics and checkpoints that a run with Fabric has, too; see `fit_model`.

    Args: stack: exit stack that closes after the fit.
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
        self.run = self._setup.start(
            TrainerRanks(trainer),
            DataShard.of(trainer.strategy),
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
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
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
