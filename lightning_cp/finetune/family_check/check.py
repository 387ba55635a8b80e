"""Run the proofs of a family that need one process, and compare the loss of a batch with those of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_cp.finetune.families import Family, Media, collate, family_for
from lightning_cp.finetune.family_check.capture import capture_proof
from lightning_cp.finetune.family_check.oracle import oracle_proof
from lightning_cp.finetune.family_check.pipeline_calls import training_models
from lightning_cp.finetune.family_check.proof import FamilyReport, Proof, store
from lightning_cp.finetune.objectives.experts import objective_for
from lightning_cp.finetune.objectives.objective import activation_dtype


def check_family(
    pipe: Any, captions: Sequence[str], media: Media, *, family: Family | None = None, negative: str = "blurred"
) -> FamilyReport:
    """Run the proofs that need one process: capture, oracle and batch.

    Args:
        pipe: pipeline; its weights may be random.
        captions: at least two, of different lengths; the pipeline samples them one by one.
        media: see `Family.encode_media`, one clip or picture per caption.
        family: None: the registered one.
        negative: negative prompt.
    """
    family = family or family_for(pipe)
    first = {name: x[:1] for name, x in media.items()}
    proofs = (
        capture_proof(pipe, family, captions[:1], first, negative=negative),
        oracle_proof(pipe, family, captions[:1], first),
        batch_proof(pipe, family, captions, media),
    )
    return FamilyReport(family.name, type(pipe).__name__, proofs)


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
