"""Train with Lightning Fabric and an explicit loop."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from hydra.utils import instantiate
from lightning.fabric import Fabric
from omegaconf import DictConfig

from lightning_cp.finetune.divided_data import set_degree
from lightning_cp.finetune.module import FineTuning
from lightning_cp.launch.channel import StopRequest
from lightning_cp.recipes.training.run import Run, check_is_done, quiet_lightning
from lightning_cp.recipes.training.setup import TrainingSetup
from lightning_cp.training.modes import without_cudnn_attention
from lightning_cp.training.ranks import DataShard


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
            fabric,
            data_shard,
            sampler,
            tuning=tuning,
            model=model,
            module=module,
            optimizer=optimizer,
            request=request,
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
