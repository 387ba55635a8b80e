"""The result of a proof, and all proofs of a pipeline together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_cp.finetune.families import Family, Media, Sample


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
