"""Save and restore the state that a run needs to resume exactly."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_model_state_dict
from torch.optim import Optimizer

from lightning_cp.checkpoint.manifest import CheckpointError, parse_manifest
from lightning_cp.checkpoint.safe_load import load_optimizer_state
from lightning_cp.checkpoint.store import Checkpoint, load_checkpoint
from lightning_cp.compat.fabric_names import keeping_optimizers_without_state
from lightning_cp.data.random_state import random_states, restore_random_states
from lightning_cp.data.sampler import OrderSampler
from lightning_cp.training.ema import WeightAverage

_WITHOUT_STATE = "without_optimizer_state"  # fact of a checkpoint: names of trained weights


@dataclass
class TrainState:
    """The state of a training run.

    Args:
        model: the Fabric-wrapped model; call this one.
        module: the same weights, unwrapped; its parameter names are used in checkpoints.
        optimizer: the Fabric-wrapped optimizer.
        average: EMA of the module's weights.
        sampler: global batch sampler, which defines the data order.
        seed: seed of noise, times and condition drop-out.
        base: describes the frozen weights, which are not saved; None: all weights are.
        step: number of completed steps.
        skipped: number of these steps without an update, because a loss or gradient was not finite.
        is_finite: True if weights, EMA and optimizer state were all finite at the last check.
    """

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    average: WeightAverage
    sampler: OrderSampler
    seed: int
    base: str | None = None
    step: int = 0
    skipped: int = 0
    is_finite: bool = True

    def named_tensors(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield (name, tensors) for each parameter's weight, EMA and optimizer state.

        The names are the same on all ranks. DTensors are not gathered.
        """
        averages = self.average.state_dict()
        for name, parameter in self.module.named_parameters():
            state = self.bare_optimizer.state.get(parameter, {})
            yield name, [parameter]
            yield f"the average of {name}", [averages[name]] if name in averages else []
            yield f"the optimizer state of {name}", [x for x in state.values() if isinstance(x, Tensor)]

    def snapshot(self) -> Checkpoint:
        """Return a checkpoint of the current state; DTensors stay sharded. Call it on every rank."""
        states = {**self._states(), "random": random_states(self.sampler.data_rank, self.sampler.data_size)}
        facts = {"sampler": self.sampler.state_dict(step=self.step), "seed": self.seed, "skipped": self.skipped}
        if self.base is not None:
            facts["base"] = self.base
        without = self._without_optimizer_state()
        if without:
            facts[_WITHOUT_STATE] = without
        return Checkpoint(self.step, states, facts)

    def load(self, folder: Path, *, verify: bool = True) -> None:
        """Load a checkpoint. The next step gets the same weights, data and noise as in an uninterrupted run.

        Call it on every rank. The number of ranks and the sharding of weights may differ from when it was saved.

        Args: verify: False if `find_checkpoint` has just verified the CRC-32 of its files.
        Raises: CheckpointError, ValueError: it is incomplete, or belongs to another model, seed or data order.
        """
        without = parse_manifest(folder).plain_facts.get(_WITHOUT_STATE, ())
        options = StateDictOptions(ignore_frozen_params=True)
        get_optimizer_state_dict(self.module, self.bare_optimizer, options=options)  # starts the state, to be filled
        states = self._states()
        for name in without:
            states["optimizer"]["state"].pop(name, None)
        saved = load_checkpoint(folder, states, verify=verify)
        missing = [name for name in ("seed", "sampler") if name not in saved.facts]
        missing += [name for name in ("model", "average", "optimizer") if name not in saved.states]
        if missing:
            raise CheckpointError(f"{folder} is not a checkpoint of a training run: it lacks {', '.join(missing)}")
        if saved.facts["seed"] != self.seed:
            raise ValueError(f"seed={self.seed} differs from the checkpoint's: use seed={saved.facts['seed']}")
        if saved.facts.get("base", self.base) != self.base:
            raise CheckpointError(
                f"{folder} was trained on other frozen weights than those of model.pretrained, model.component and "
                "model.quantize: use the settings of the checkpoint's run (its .hydra/config.yaml)"
            )
        self.sampler.load_state_dict(saved.facts["sampler"])
        trained = StateDictOptions(strict=False)  # frozen weights are not stored
        set_model_state_dict(self.module, saved.states["model"], options=trained)
        self.average.load_state_dict(saved.states["average"])
        current = [dict(group) for group in self.bare_optimizer.param_groups]
        optimizer = saved.states["optimizer"]
        load_optimizer_state(self.module, self.bare_optimizer, optim_state_dict=optimizer, options=options)
        settings = _settings_of(self.bare_optimizer)
        for group, here in zip(self.bare_optimizer.param_groups, current, strict=True):
            # Keep this run's optimizer settings, which may differ. Other values are state, such as Prodigy's estimate.
            group.update({key: x for key, x in here.items() if key in settings or key not in group})
        restore_random_states(saved.states.get("random", []), self.sampler.data_rank, self.sampler.data_size)
        self.step, self.skipped = saved.step, saved.facts.get("skipped", 0)

    def _states(self) -> dict[str, Any]:
        """Return weights, EMA and the optimizer's state, which is not changed: none for weights without a gradient."""
        options = StateDictOptions(ignore_frozen_params=True)
        with keeping_optimizers_without_state():
            optimizer = get_optimizer_state_dict(self.module, self.bare_optimizer, options=options)
        model = self._without_frozen(self.module.state_dict())
        return {"model": model, "average": self.average.state_dict(), "optimizer": optimizer}

    def _without_optimizer_state(self) -> list[str]:
        """Return the trained weights that have had no gradient yet, such as the last text layers of QwenImage."""
        state, parameters = self.bare_optimizer.state, self.module.named_parameters()
        return [name for name, x in parameters if x.requires_grad and not state.get(x)]

    def _without_frozen(self, state: dict[str, Any]) -> dict[str, Any]:
        """Leave out frozen weights; quanto stores several tensors of a quantised one, under longer names."""
        frozen = {name for name, x in self.module.named_parameters() if not x.requires_grad}
        return {name: x for name, x in state.items() if not {name, name.rpartition(".")[0]} & frozen}

    @property
    def bare_optimizer(self) -> Optimizer:
        """Return the user's optimizer, without Fabric's wrapper."""
        optimizer: Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer


def _settings_of(optimizer: Optimizer) -> set[str]:
    """Return the values of parameter groups that are settings: arguments of the optimizer, or all if it names none."""
    arguments = inspect.signature(type(optimizer)).parameters
    has_other = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in arguments.values())
    return {"params", *arguments, *(optimizer.defaults if has_other else ())}
