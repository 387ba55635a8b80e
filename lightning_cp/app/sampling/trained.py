"""Samples from a checkpoint of a run, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from typing_extensions import override

from lightning_cp.app.settings.foreign import check_model_classes
from lightning_cp.checkpoint import CheckpointError
from lightning_cp.checkpoint.manifest import check_same_tensors
from lightning_cp.checkpoint.shards import has_shards, load_shards
from lightning_cp.checkpoint.store import load_checkpoint
from lightning_cp.mesh import Branches
from lightning_cp.pipelines.rows import cfg_merge, cfg_split


def load_denoiser(config: DictConfig, checkpoint: Path, *, trust: bool = False) -> nn.Module:
    """Build the model of a run, with the averaged weights of one of its checkpoints, on the CPU and in eval mode.

    Args:
        config: configuration of the run (its `.hydra/resolved.yaml`).
        checkpoint: a folder, of either format.
        trust: build whatever class, or call whatever function, the configuration names; else only the models of
            `lightning_cp.training` with diffusers' transformers.
    Ranks: each for itself.
    Raises:
        CheckpointError: the checkpoint is incomplete, or of another model.
        SettingsError: `config.model` names a class that only `trust` allows.
    """
    model = OmegaConf.to_container(config.model, resolve=True)
    if not trust:
        check_model_classes(model, "config")
    module: nn.Module = instantiate(model, _convert_="all")
    average = {name: torch.empty_like(p) for name, p in module.named_parameters()}
    states: dict[str, Any] = {"model": module.state_dict(), "average": average}
    saved = load_shards(checkpoint, states) if has_shards(checkpoint) else load_checkpoint(checkpoint)
    absent = [name for name in states if name not in saved.states]
    if absent:
        raise CheckpointError(f"{checkpoint} is no checkpoint of a training run: it lacks {', '.join(absent)}")
    weights = {**saved.states["model"], **saved.states["average"]}
    here = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    check_same_tensors(here, {name: tuple(x.shape) for name, x in weights.items()}, checkpoint)
    module.load_state_dict(weights)
    return module.eval().requires_grad_(False)


class SharedGuidance(nn.Module):
    """A denoiser whose batches, which hold both branches of guidance, are shared out over the `cfg` axis.

    Args:
        model: `model(x [n, ...], times [n], labels [n]) -> velocity [n, ...]`.
        ranks: from `lightning_cp.pipelines.sampling_ranks`.
    """

    def __init__(self, model: nn.Module, ranks: Branches) -> None:
        super().__init__()
        self.model, self.ranks = model, ranks

    @override
    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Ranks: those of all branches, with equal arguments."""
        mine = cfg_split((x, times, labels), self.ranks, like=x)
        merged: Tensor = cfg_merge(self.model(*mine), self.ranks, like=x)
        return merged


class WithPrecision(nn.Module):
    """A model in the precision that Fabric was given, without its wrapper, which is for training.

    Args: fabric: whose precision it is. model: on its device; converted in place.
    """

    def __init__(self, fabric: Any, model: nn.Module) -> None:
        super().__init__()
        self._precision = fabric.strategy.precision
        self.model = self._precision.convert_module(model)

    @override
    def forward(self, *args: Any) -> Any:
        with self._precision.forward_context():
            return self._precision.convert_output(self.model(*self._precision.convert_input(args)))
