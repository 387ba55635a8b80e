"""Build a training run from scratch: a small denoiser on data with class labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers import ModelMixin
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import IterableDataset, default_collate
from typing_extensions import override

from lightning_cp.data import GlobalBatchSampler
from lightning_cp.data.sampler import OrderSampler
from lightning_cp.finetune.families import StoredBatch
from lightning_cp.finetune.objectives import FlowMatching
from lightning_cp.recipes.digits.family import LabelledClips
from lightning_cp.recipes.settings.consistency import sequence_length
from lightning_cp.recipes.training.setup import TrainingSetup
from lightning_cp.training.ranks import DataShard


@dataclass(frozen=True)
class FromScratch(TrainingSetup):
    """Training of a small denoiser with class labels from scratch."""

    @classmethod
    def of(cls, config: DictConfig) -> FromScratch:
        """Build the objective and load the data set. Raises: ValueError: it has no length or no samples by index."""
        family = LabelledClips({"num_classes": config.data.num_classes})
        objective = FlowMatching(seed=config.seed, cond_dropout=config.cond_dropout)
        dataset = instantiate(config.data.dataset)
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise ValueError(
                f"data.dataset._target_={config.data.dataset._target_} must have __len__ and __getitem__: "
                "a resumed run reads samples by index"
            )
        return cls(config, dataset, family, objective)

    @override
    def collate(self, samples: list[Any]) -> StoredBatch:
        assert isinstance(self.family, LabelledClips), "of() builds it"
        join = getattr(self.dataset, "collate", default_collate)
        pixels, labels = join(samples)
        return self.family.batch(pixels, labels)

    @override
    def denoiser(self) -> nn.Module:
        module: Any = instantiate(self.config.model, _convert_="all")  # plain lists, as diffusers writes them
        if self.config.export and not isinstance(module.transformer, ModelMixin):
            raise ValueError(
                "export=true writes a transformer of diffusers at the end, and this model has a "
                f"{type(module.transformer).__name__}: use export=false"
            )
        self.checkpointed(module.transformer)
        built: nn.Module = module
        return built

    @override
    def sampler(self, strategy: Any) -> OrderSampler:
        config, data_shard = self.config, DataShard.of(strategy)
        return GlobalBatchSampler(
            len(self.dataset), config.batch_size, seed=config.seed, data_rank=data_shard.rank, data_size=data_shard.size
        )

    @property
    @override
    def tokens(self) -> int:
        return sequence_length(self.config) or 0
