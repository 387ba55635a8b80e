"""Refuse pipelines and guiders that perturb a transformer in a way that cannot be context-parallel."""

from __future__ import annotations

from typing import Any

from lightning_cp.errors import PlanError
from lightning_cp.mesh.sample_groups import SampleGroups


def refuse_processor_swaps(pipe: Any) -> None:
    """Refuse PAG pipelines, because each call replaces our attention processors. Raises: PlanError."""
    if hasattr(pipe, "set_pag_applied_layers"):
        name = type(pipe).__name__
        raise PlanError(
            f"{name} replaces attention processors in each call (perturbed attention guidance), so attention would be "
            f"limited to the tokens of one rank: use {name.replace('PAG', '')}, or run it in one process. (In "
            "pipelines with guiders, the guider PerturbedAttentionGuidance is supported)"
        )


def check_guiders(pipe: Any, ranks: SampleGroups) -> None:
    """Before a call, refuse guiders with random dropout: ranks would draw different values. Raises: PlanError."""
    if ranks.sample.context_size == 1:
        return
    for name, guider in pipe.components.items():
        for dropout in _dropouts(guider):
            if dropout not in (0, 1):
                raise PlanError(
                    f"{type(pipe).__name__}.{name}: {type(guider).__name__} has random dropout (dropout={dropout}), "
                    "for which ranks would draw other numbers than one process: use dropout=1.0, which skips the layers"
                )


def _dropouts(guider: Any) -> list[float]:
    """Return the dropouts of the `LayerSkipConfig`s of diffusers in any attribute of a guider."""
    values = vars(guider).values() if hasattr(guider, "prepare_models") else ()
    configs = [config for value in values if isinstance(value, list) for config in value]
    return [config.dropout for config in configs if hasattr(config, "skip_attention_scores")]
