"""Training objectives: noise, times, targets and losses, with random draws that depend only on (seed, step, index)."""

from lightning_cp.finetune.objectives.diffusion import Diffusion
from lightning_cp.finetune.objectives.experts import ExpertFlowMatching, objective_for
from lightning_cp.finetune.objectives.flow import Density, FlowMatching, LogitNormal, Uniform
from lightning_cp.finetune.objectives.micro_batch import MicroBatch, micro_batches
from lightning_cp.finetune.objectives.objective import Noised, Objective
from lightning_cp.finetune.objectives.policy import (
    SdeStep,
    dpo_loss,
    gaussian_kl,
    group_advantages,
    policy_loss,
    reference_policy,
    sde_step,
)

__all__ = [
    "Density",
    "Diffusion",
    "ExpertFlowMatching",
    "FlowMatching",
    "LogitNormal",
    "MicroBatch",
    "Noised",
    "Objective",
    "SdeStep",
    "Uniform",
    "dpo_loss",
    "gaussian_kl",
    "group_advantages",
    "micro_batches",
    "objective_for",
    "policy_loss",
    "reference_policy",
    "sde_step",
]
