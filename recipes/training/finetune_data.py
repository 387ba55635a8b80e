"""The data of a fine-tuning run: the order of its batches, and a folder of media that is encoded at its start."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from lightning_cp.data import BucketBatchSampler
from lightning_cp.data.divided_sampler import BatchDivision, DividedBatchSampler
from lightning_cp.data.sampler import OrderSampler
from lightning_cp.errors import DataError
from lightning_cp.files import read_json
from lightning_cp.finetune.data import needs_division, step_degrees
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.fits import width_of
from lightning_cp.finetune.weight_files import local_pipeline
from lightning_cp.launch.rank import launcher_env
from lightning_cp.recipes.settings.components import components_of
from lightning_cp.recipes.settings.data_folders import data_folders
from lightning_cp.recipes.settings.world import is_single
from lightning_cp.recipes.terminal import printable
from lightning_cp.training.ranks import DataShard


def batch_order(config: DictConfig, data: Any, family: Family, strategy: Any) -> OrderSampler:
    """Build the sampler of a cache's samples: batches of one size, or divided ones (`data.mixed`, `degrees`, weights).

    Args:
        data: the training data.
        strategy: it has the data ranks.
    """
    ranks = None if is_single(config) else strategy
    if config.data.mixed or needs_division(data, ranks):
        division, degrees = _division(config, data, family), step_degrees(ranks)
        return DividedBatchSampler(division, config.batch_size, degrees, mixed=config.data.mixed, seed=config.seed)
    shard = DataShard.of(strategy)
    return BucketBatchSampler(
        data.buckets, config.batch_size, seed=config.seed, with_epoch=True, data_rank=shard.rank, data_size=shard.size
    )


def _division(config: DictConfig, data: Any, family: Family) -> BatchDivision:
    source, name = config.model.pretrained, components_of(config)[0]
    model = read_json(local_pipeline(source, name, setting="model.pretrained") / name / "config.json")
    return BatchDivision(
        data.buckets,
        data.tokens,
        attention_tokens=6 * width_of(model),
        part_size=1 if family.one_per_call else config.micro_batch_size,
        reduction=config.objective.reduction,
        weights=data.weights,
    )


_POLL_S = 0.5


def _rank_and_folder(run_dir: str) -> tuple[int, Path]:
    """Return this rank and rank 0's run folder: with another launcher, ranks compose names with different times."""
    if dist.is_initialized():
        run_dirs = [run_dir]
        dist.broadcast_object_list(run_dirs, src=0)
        return dist.get_rank(), Path(run_dirs[0])
    slurm = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
    if "TORCHELASTIC_RUN_ID" in os.environ or launcher_env(slurm) is not None:
        raise DataError(
            "data=folder with trainer=lightning cannot be started by torchrun or SLURM: encode the folder with "
            "lightning-cp precompute and use data=latents, or use trainer=fabric"
        )
    return int(os.environ.get("RANK", "0")), Path(run_dir)


def encoded_folder(config: DictConfig) -> Path:
    """Encode `data.path` into the run's folder on rank 0, and return the cache's folder on every rank.

    The other ranks wait; if rank 0 fails, the launcher ends them.

    Raises: DataError: another launcher started the ranks, and they cannot agree on a folder yet (Trainer).
    """
    rank, run_folder = _rank_and_folder(config.run_dir)
    folder = run_folder / "latents"
    if rank:
        while not (folder / "contents.json").is_file():
            time.sleep(_POLL_S)
        return folder
    from lightning_cp.finetune.media import DataFolder
    from lightning_cp.finetune.precompute import PrecomputeSettings, precompute
    from lightning_cp.finetune.precompute.run import SKIPPED

    chosen: Any = OmegaConf.to_container(config.data)
    settings = PrecomputeSettings(**{name: chosen[name] for name in ("captions", "sizes", "frames", "fps")})
    device = torch.device("cuda" if config.accelerator == "cuda" else "cpu")
    result = precompute(
        config.model.pretrained,
        [DataFolder(**one) for one in data_folders(config)],
        folder,
        settings=settings,
        device=device,
        progress=config.progress,
    )
    if result.changed or result.dropped:
        print(
            f"{printable(config.data.path)} has changed since an earlier run stored it: {result.changed} samples have "
            f"other contents, {result.dropped} are gone; {result.encoded} were encoded now, {result.stored} kept",
            flush=True,
        )
    for skipped in result.skipped[:10]:
        print(f"skipped: {printable(skipped, keep='')}", flush=True)
    if len(result.skipped) > 10:
        print(printable(f"… and {len(result.skipped) - 10} more, see {folder / SKIPPED}"), flush=True)
    return folder
