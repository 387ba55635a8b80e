"""Batch: the loss of a batch must be the mean of its samples' losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_cp.families import Family, Media, collate
from lightning_cp.family_check.proof import Proof, store
from lightning_cp.objectives.objective import objective_for

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@torch.no_grad()
def batch_proof(pipe: Any, family: Family, captions: Sequence[str], media: Media) -> Proof:
    """Compare the losses of a batch with texts of different lengths with those of each sample alone."""
    samples = store(family, pipe, captions, media)
    transformer = getattr(pipe, family.components.train[0])
    objective = objective_for(family, seed=0)
    together = objective.sample_losses(transformer, family, collate(samples, family.text), step=3, first_index=0)
    alone = torch.cat(
        [
            objective.sample_losses(transformer, family, collate([sample], family.text), step=3, first_index=i)
            for i, sample in enumerate(samples)
        ]
    )
    error = float(((together - alone).abs() / alone).max())
    return Proof("batch", error, _TOLERANCE.get(transformer.dtype, 2e-2), "")
