"""All that a run must remember to go on exactly."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_cp.checkpoint.manifest import CheckpointError
from lightning_cp.checkpoint.store import load_checkpoint, save_checkpoint
from lightning_cp.data import GlobalBatchSampler
from lightning_cp.training.ema import WeightAverage, whole_of


@dataclass
class TrainState:
    """The parts of a run.

    Args:
        model: as Fabric wrapped it; call this one.
        module: the same weights, unwrapped; its names are those of the checkpoint.
        optimizer: as Fabric wrapped it.
        average: of the module's weights.
        sampler: of the data order.
        seed: of noise, times and drop-out.
        step: steps done.
    """

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    average: WeightAverage
    sampler: GlobalBatchSampler
    seed: int
    step: int = 0

    def save(self, parent: Path, *, keep: int | None = None, writes: bool = True) -> Path:
        """Writes `parent/step_<n>`, whole whatever the sharding. Call it on every rank; one of them writes."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        states = {
            "model": get_model_state_dict(self.module, options=options),
            "average": {name: whole_of(x) for name, x in self.average.state_dict().items()},
            "optimizer": get_optimizer_state_dict(self.module, self._bare_optimizer, options=options),
        }
        facts: dict[str, Any] = {"sampler": self.sampler.state_dict(step=self.step), "seed": self.seed}
        if not writes:
            return parent / f"step_{self.step:08d}"
        return save_checkpoint(parent, step=self.step, states=states, facts=facts, keep=keep)

    def load(self, folder: Path) -> None:
        """Goes on from a checkpoint: the next step sees the weights, the data and the noise that it would have seen.

        Call it on every rank. The number of ranks may be another one.

        Raises: CheckpointError, ValueError: it is not complete, or belongs to another model, seed or data order.
        """
        saved = load_checkpoint(folder)
        absent = [name for name in ("seed", "sampler") if name not in saved.facts]
        absent += [name for name in ("model", "average", "optimizer") if name not in saved.states]
        if absent:
            raise CheckpointError(f"{folder} is no checkpoint of a training run: it lacks {', '.join(absent)}")
        if saved.facts["seed"] != self.seed:
            raise ValueError(f"seed={self.seed} differs from the checkpoint's seed={saved.facts['seed']}; use that")
        _check_same_model(self.module, saved.states["model"], folder)
        self.sampler.load_state_dict(saved.facts["sampler"])
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.module, saved.states["model"], options=options)
        self.average.load_state_dict(saved.states["average"])
        set_optimizer_state_dict(self.module, self._bare_optimizer, saved.states["optimizer"], options=options)
        self.step = saved.step

    @property
    def _bare_optimizer(self) -> Optimizer:
        found: Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return found


def _check_same_model(module: nn.Module, saved: dict[str, Any], folder: Path) -> None:
    here = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    there = {name: tuple(x.shape) for name, x in saved.items()}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise ValueError(
                f"the model differs from the checkpoint's in {folder}: {name} is {here.get(name, 'absent')} here and "
                f"{there.get(name, 'absent')} there; use the model settings of that run (its .hydra/config.yaml)"
            )
