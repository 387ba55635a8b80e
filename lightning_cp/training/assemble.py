"""From a composed configuration to the parts of a run."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning.fabric import Fabric
from omegaconf import DictConfig
from torch.utils.data import DataLoader

from lightning_cp.data import GlobalBatchSampler, worker_init_fn
from lightning_cp.launch.combined import sequence_length
from lightning_cp.training.ema import WeightAverage
from lightning_cp.training.flow import FlowMatching
from lightning_cp.training.loop import Batch, LoopSettings, Watcher, fit
from lightning_cp.training.records import MetricsFile, ProgressBar
from lightning_cp.training.run import RunFolder, data_place, open_run_folder, start_fabric
from lightning_cp.training.state import TrainState


@dataclass(frozen=True)
class Run:
    """The parts of a run on this rank."""

    fabric: Fabric
    folder: RunFolder
    state: TrainState
    loader: DataLoader[Batch]
    sample_shape: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and speaks."""
        return bool(self.fabric.is_global_zero)


def build_run(config: DictConfig) -> Run:
    """Joins the other ranks and builds all parts, resumed where the configuration says so. Call it on every rank."""
    fabric: Fabric = instantiate(config.trainer)
    start_fabric(fabric, seed=config.seed)
    folder = open_run_folder(fabric, config.run_dir)
    dataset: Any = instantiate(config.data.dataset)
    place = data_place(fabric)
    sampler = GlobalBatchSampler(
        len(dataset), config.batch_size, seed=config.seed, data_rank=place.rank, data_size=place.size
    )
    seed_worker = worker_init_fn(config.seed, place.rank)
    loader: Any = fabric.setup_dataloaders(
        DataLoader(dataset, batch_sampler=sampler, num_workers=config.num_workers, worker_init_fn=seed_worker),
        use_distributed_sampler=False,
    )
    module = instantiate(config.model)
    model, optimizer = fabric.setup(module, instantiate(config.optim, params=module.parameters()))
    average = WeightAverage(module, config.ema_decay)
    state = TrainState(model, module, optimizer, average, sampler, config.seed)
    if config.resume is not None:
        state.load(Path(config.resume))
    return Run(fabric, folder, state, loader, dataset.sample_shape)


def fit_run(run: Run, config: DictConfig, *, after_step: Callable[[int], None] | None = None) -> None:
    """Trains to `max_steps`, with metrics and a progress bar on the first rank. Call it on every rank."""
    settings = LoopSettings(
        max_steps=config.max_steps,
        lr=config.optim.lr,
        warmup_steps=config.warmup_steps,
        clip_norm=config.clip_norm,
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep_checkpoints,
        tokens=sequence_length(config) or 0,
    )
    with ExitStack() as stack:
        watchers: list[Watcher] = []
        if run.is_first:
            done, metrics = run.state.step, run.folder.metrics
            watchers.append(stack.enter_context(MetricsFile(metrics, resumed_at=done, every=config.log_every)))
            if config.progress:
                watchers.append(stack.enter_context(ProgressBar(config.max_steps, start=done)))
        fit(
            run.fabric,
            run.state,
            FlowMatching(config.seed, config.data.num_classes, config.drop_probability),
            run.loader,
            settings=settings,
            checkpoints=run.folder.checkpoints,
            watchers=watchers,
            after_step=after_step,
        )
