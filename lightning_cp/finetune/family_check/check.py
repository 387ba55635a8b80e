"""Run the proofs of a family that need one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_cp.finetune.families import Family, Media, family_for
from lightning_cp.finetune.family_check.batch import batch_proof
from lightning_cp.finetune.family_check.capture import capture_proof
from lightning_cp.finetune.family_check.oracle import oracle_proof
from lightning_cp.finetune.family_check.proof import FamilyReport


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
