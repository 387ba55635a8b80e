"""Prove that a model family feeds and reads its transformer as the pipeline does: four proofs, no trained weights."""

from lightning_cp.finetune.family_check.capture import capture_proof
from lightning_cp.finetune.family_check.check import batch_proof, check_family
from lightning_cp.finetune.family_check.oracle import oracle_proof
from lightning_cp.finetune.family_check.pipeline_calls import training_models, transformers_of
from lightning_cp.finetune.family_check.proof import FamilyReport, Proof, store
from lightning_cp.finetune.family_check.topology import topology_proof

__all__ = [
    "FamilyReport",
    "Proof",
    "batch_proof",
    "capture_proof",
    "check_family",
    "oracle_proof",
    "store",
    "topology_proof",
    "training_models",
    "transformers_of",
]
