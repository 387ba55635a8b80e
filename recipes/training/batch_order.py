"""Build the order of the batches of a fine-tuning run."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from lightning_cp.data import BucketBatchSampler
from lightning_cp.data.divided_sampler import BatchDivision, DividedBatchSampler
from lightning_cp.data.sampler import OrderSampler
from lightning_cp.files import read_json
from lightning_cp.finetune.divided_data import needs_division, step_degrees
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.fits import width_of
from lightning_cp.finetune.weight_files import local_pipeline
from lightning_cp.recipes.settings.components import components_of
from lightning_cp.recipes.settings.world import is_single
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
        data.buckets,
        config.batch_size,
        seed=config.seed,
        with_epoch=True,
        data_rank=shard.rank,
        data_size=shard.size,
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
