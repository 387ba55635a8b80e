"""The result of a proof, and all proofs of a pipeline together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_cp.finetune.families import Family, Media, Sample, family_for


@dataclass(frozen=True)
class Proof:
    """One proof of a family.

    Attributes:
        name: capture, oracle, batch or topology, with its variant.
        error: largest error, relative to the largest expected value.
        tolerance: largest error that passes.
        found: description of the largest difference; empty if there is none.
    """

    name: str
    error: float
    tolerance: float
    found: str = ""

    @property
    def passed(self) -> bool:
        """True if the error is within the tolerance."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class FamilyReport:
    """The proofs of one pipeline. Attributes: family: its name. pipeline: class name of the pipeline."""

    family: str
    pipeline: str
    proofs: tuple[Proof, ...]

    @property
    def passed(self) -> bool:
        """True if every proof passed."""
        return all(proof.passed for proof in self.proofs)


def store(family: Family, pipe: Any, captions: Sequence[str], media: Media) -> list[Sample]:
    """Encode captions and media to stored samples."""
    with torch.no_grad():
        texts = family.encode_text(pipe, captions, media)
        return [{**text, **sample} for text, sample in zip(texts, family.encode_media(pipe, media), strict=True)]


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
    from lightning_cp.finetune.family_check.batch import batch_proof
    from lightning_cp.finetune.family_check.capture import capture_proof
    from lightning_cp.finetune.family_check.oracle import oracle_proof

    family = family or family_for(pipe)
    first = {name: x[:1] for name, x in media.items()}
    proofs = (
        capture_proof(pipe, family, captions[:1], first, negative=negative),
        oracle_proof(pipe, family, captions[:1], first),
        batch_proof(pipe, family, captions, media),
    )
    return FamilyReport(family.name, type(pipe).__name__, proofs)
