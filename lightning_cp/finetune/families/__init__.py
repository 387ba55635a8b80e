"""Model families for fine-tuning: how each family encodes data, and what its transformer takes and returns."""

from lightning_cp.finetune.families.family import (
    Components,
    Facts,
    Family,
    Grid,
    InputOptions,
    Media,
    Sample,
    SideModel,
    Stored,
    TextStorage,
)
from lightning_cp.finetune.families.registry import family_for, load_family, pipelines, register_family
from lightning_cp.finetune.families.schedule import ObjectiveDefaults, ResolutionShift
from lightning_cp.finetune.families.stored import StoredBatch, collate

__all__ = [
    "Components",
    "Facts",
    "Family",
    "Grid",
    "InputOptions",
    "Media",
    "ObjectiveDefaults",
    "ResolutionShift",
    "Sample",
    "SideModel",
    "Stored",
    "StoredBatch",
    "TextStorage",
    "collate",
    "family_for",
    "load_family",
    "pipelines",
    "register_family",
]
