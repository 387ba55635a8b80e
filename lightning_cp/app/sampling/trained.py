"""Load the model of a run's checkpoint for sampling, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from typing_extensions import override

from lightning_cp.app.settings.foreign import check_model_classes
from lightning_cp.checkpoint.store import load_checkpoint
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines.guidance.cfg_samples import cfg_merge, cfg_split


def load_denoiser(
    config: DictConfig,
    checkpoint: Path,
    *,
    trust: bool = False,
    verify: bool = True,
) -> nn.Module:
    """Build the model of a run with the EMA weights of a checkpoint, on the CPU and in eval mode.

    Args:
        config: configuration of the run (its `.hydra/resolved.yaml`).
        checkpoint: checkpoint folder.
        trust: allow any class or function that the configuration names. False: only the classes in `MODEL_CLASSES`
            of `lightning_cp.app.settings.foreign`.
        verify: False if `find_checkpoint` has just verified the checkpoint.
    Ranks: the whole world; each reads all weights.
    Raises:
        CheckpointError: the checkpoint is incomplete, or belongs to another model.
        SettingsError: `config.model` names a class that needs `trust`.
    """
    model = OmegaConf.to_container(config.model, resolve=True)
    if not trust:
        check_model_classes(model, "config")
    module: nn.Module = instantiate(model, _convert_="all")
    average = {name: torch.empty_like(p) for name, p in module.named_parameters()}
    states: dict[str, Any] = {"model": module.state_dict(), "average": average}
    saved = load_checkpoint(checkpoint, states, verify=verify)
    module.load_state_dict({**saved.states["model"], **saved.states["average"]})
    return module.eval().requires_grad_(False)


class SharedGuidance(nn.Module):
    """A denoiser with its batch split over the `cfg` axis; the batch holds both CFG branches.

    Args:
        model: denoiser, `model(x [n, ...], times [n], labels [n]) -> velocity [n, ...]`.
        ranks: CFG branches, from `lightning_cp.pipelines.sampling_ranks`.
        around: function that returns the context of a call of the denoiser at a time, such as `CachedSteps`; None: no
            context.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: SampleGroups,
        around: Callable[[float], AbstractContextManager[None]] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.ranks, self.around = model, ranks, around

    @override
    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Run the model on this rank's samples and gather the results. Ranks: all branches, with equal arguments."""
        local = cfg_split((x, times, labels), self.ranks, like=x)
        with nullcontext() if self.around is None else self.around(float(times[0])):
            merged: Tensor = cfg_merge(self.model(*local), self.ranks, like=x)
        return merged
