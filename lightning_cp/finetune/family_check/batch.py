"""Batch: the loss of a batch must be the mean of its samples' losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_cp.finetune.families import Family, Media, collate
from lightning_cp.finetune.family_check.pipeline_calls import training_models
from lightning_cp.finetune.family_check.proof import Proof, store
from lightning_cp.finetune.objectives.default import objective_for
from lightning_cp.finetune.objectives.objective import activation_dtype

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
_LOW_PRECISION = 2e-2


@torch.no_grad()
def batch_proof(pipe: Any, family: Family, captions: Sequence[str], media: Media) -> Proof:
    """Compare the losses of a batch with texts of different lengths with those of each sample alone.

    Every transformer of the pipeline is compared.
    """
    samples = store(family, pipe, captions, media)
    together = collate(samples, family.text)
    alone = [collate([sample], family.text) for sample in samples]
    objective, errors, tolerance = objective_for(family, seed=0), [0.0], 1.0
    for transformer in training_models(pipe, family):
        losses = objective.sample_losses(transformer, family, together, step=3, first_index=0)
        singles = torch.cat(
            [objective.sample_losses(transformer, family, x, step=3, first_index=i) for i, x in enumerate(alone)]
        )
        errors.append(float(((losses - singles).abs() / singles).max()))
        tolerance = min(tolerance, _TOLERANCE.get(activation_dtype(transformer), _LOW_PRECISION))
    return Proof("batch", max(errors), tolerance, "")
