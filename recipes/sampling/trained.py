"""Load the denoiser of a run for sampling, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import override

from lightning_cp.checkpoint import CheckpointError
from lightning_cp.finetune.load import load_exported
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines.guidance.cfg_samples import cfg_merge, cfg_split
from lightning_cp.recipes.digits import denoisers
from lightning_cp.recipes.settings.trained import TrainedDenoiser


def load_denoiser(run: Path) -> nn.Module:
    """Load a denoiser with its EMA weights, on the CPU and in eval mode. No file of the run can name code to call.

    Args: run: folder of a run that `lightning-cp train` trained from scratch, to its end.
    Raises:
        ValueError: `denoiser.json` or `transformer/` is missing, damaged or of another model.
        CheckpointError: `conditioning.safetensors` is.
    """
    trained = TrainedDenoiser.read(run)
    transformer = load_exported(run / "transformer", dtype=torch.float32)
    patch = {} if trained.patch_size is None else {"patch_size": tuple(trained.patch_size)}
    arguments = {"num_classes": trained.num_classes, "num_tokens": trained.num_tokens, **patch}
    module: nn.Module = getattr(denoisers, trained.denoiser)(transformer, **arguments)
    own = {f"transformer.{name}": x for name, x in transformer.state_dict().items()}
    path = run / denoisers.CONDITIONING_FILE
    try:
        module.load_state_dict({**load_file(path), **own})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be used: {' '.join(str(error).split())[:300]}") from None
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
