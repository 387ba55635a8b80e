"""Optimizer states from a checkpoint: each parameter gets the state of this parameter, in each format and flavour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.checkpoint import CheckpointError
from tests.dist.lightning_ranks import STRATEGIES, fabric_of, trainer_of, whole
from tests.harness import RankPool
from tests.harness.cases import pairwise

pytestmark = pytest.mark.filterwarnings("ignore")

_States = dict[str, tuple[float, float | None, Tensor | None]]  # learning rate, step, exp_avg
_CLIPS = [torch.arange(4.0) / 4 + index for index in range(4)]


class _Layers(LightningModule):
    """Layers of one shape. The first is frozen, the last has no gradient; optimizers get the rest in another order."""

    def __init__(self, optimizers: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(5))
        self.layers[0].requires_grad_(False)
        self.automatic_optimization, self._kind = False, optimizers

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:4]:
            x = layer(x).tanh()
        return x.square().sum()

    @override
    def training_step(self, batch: Tensor, _: int) -> None:
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.manual_backward(self(batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @override
    def configure_optimizers(self) -> list[Optimizer]:
        _, second, third, fourth, fifth = self.layers.parameters()
        if self._kind == "groups":
            return [AdamW([{"params": [fifth, fourth, second]}, {"params": [third], "lr": 0.3}], lr=0.1)]
        if self._kind == "fewer":
            return [AdamW([{"params": [fourth, second]}, {"params": [third], "lr": 0.3}], lr=0.1)]
        if self._kind == "frozen":
            return [AdamW([*self.layers[0].parameters(), fourth, second, third], lr=0.1)]
        if self._kind == "without state":  # one that never steps, and one that keeps nothing
            return [AdamW([fifth], lr=0.1), SGD([fourth, second], lr=0.2), AdamW([third], lr=0.3)]
        return [AdamW([fifth, third], lr=0.1), AdamW([fourth, second], lr=0.2)]


def _strategy(flavour: str, kind: str, world: int) -> Any:
    if kind == "cp":
        return STRATEGIES[flavour, "cp"](ring=world, find_unused_parameters=True)
    return STRATEGIES[flavour, "cp_fsdp"](ring=world, save_distributed_checkpoint=kind == "shards")


def _states(module: nn.Module, optimizers: list[Any]) -> _States:
    names = {parameter: name for name, parameter in module.named_parameters()}
    found: _States = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                values = (float(state["step"]), whole(state["exp_avg"]).clone()) if state else (None, None)
                found[names[parameter]] = (group["lr"], *values)
    return found


def _differences(saved: _States, loaded: _States) -> list[str]:
    assert any(average is not None for _, _, average in saved.values())
    found = sorted(saved.keys() ^ loaded.keys())
    for name in saved.keys() & loaded.keys():
        (*numbers, average), (*others, other) = saved[name], loaded[name]
        equal = average is other if average is None or other is None else torch.allclose(average, other, atol=1e-7)
        found += [] if numbers == others and equal else [f"{name} {numbers} {others}"]
    return found


def _set_up(rank: int, world: int, kind: str, module: _Layers) -> tuple[Any, dict[str, Any]]:
    ranks = fabric_of(rank, world, _strategy("fabric", kind, world))
    model, *optimizers = ranks.setup(module, *module.configure_optimizers())
    return ranks, {"model": model, **{f"optimizer {i}": x for i, x in enumerate(optimizers)}}


def _with_fabric(rank: int, world: int, kinds: tuple[str, str], optimizers: str, path: Path) -> list[str]:
    module = _Layers(optimizers)
    ranks, state = _set_up(rank, world, kinds[0], module)
    for clip in _CLIPS:
        ranks.backward(state["model"](clip))
        for one in list(state.values())[1:]:
            one.step()
            one.zero_grad()
    ranks.save(path, state)
    resumed = _Layers(optimizers)
    others, loaded = _set_up(rank, world, kinds[1], resumed)
    others.load(path, loaded)
    return _differences(_states(module, list(state.values())[1:]), _states(resumed, list(loaded.values())[1:]))


class _Records(Callback):
    """Record the states before the first step."""

    states: _States

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.states = _states(pl_module, trainer.optimizers)


def _with_trainer(rank: int, world: int, kinds: tuple[str, str], optimizers: str, path: Path) -> list[str]:
    module, records = _Layers(optimizers), _Records()
    trainer = trainer_of(rank, world, _strategy("trainer", kinds[0], world), max_epochs=1)
    trainer.fit(module, DataLoader(_CLIPS))
    trainer.save_checkpoint(path)
    saved = _states(module, trainer.optimizers)
    trainer = trainer_of(rank, world, _strategy("trainer", kinds[1], world), max_epochs=2, callbacks=[records])
    trainer.fit(_Layers(optimizers), DataLoader(_CLIPS), ckpt_path=str(path))
    return _differences(saved, records.states)


_FLAVOURS = {"fabric": _with_fabric, "trainer": _with_trainer}


def _resume(rank: int, world: int, folder: str, cases: list[tuple[str, str, str, str]]) -> list[Any]:
    """By case (flavour, saved and loaded format, optimizers): what differs."""
    return [
        (case, _FLAVOURS[case[0]](rank, world, (case[1], case[2]), case[3], Path(folder) / "-".join(case)))
        for case in cases
    ]


@pytest.mark.full
def test_each_parameter_gets_its_state_in_all_formats(run_ranks: RankPool, tmp_path: Path) -> None:
    kinds = [("cp", "file"), ("file", "cp"), ("file", "file"), ("shards", "shards"), ("cp", "cp")]
    optimizers = ("groups", "several", "frozen", "without state")
    cases = [(x, *pair, y) for x, pair, y in pairwise(_FLAVOURS, kinds, optimizers)]
    for found in run_ranks(3, _resume, str(tmp_path), cases, init=False):
        assert len(found) == len(cases)
        for case, differences in found:
            assert differences == [], case


def _refused(rank: int, world: int, folder: str) -> list[str]:
    """Load an optimizer with other parameters than the saved one. Returns: the errors."""
    errors = []
    for kind, other in (("cp", "fewer"), ("cp", "frozen"), ("file", "frozen"), ("shards", "frozen")):
        path = Path(folder) / f"{kind} {other}"
        ranks, state = _set_up(rank, world, kind, _Layers("groups"))
        for clip in _CLIPS:
            ranks.backward(state["model"](clip))
        state["optimizer 0"].step()
        ranks.save(path, state)
        others, loaded = _set_up(rank, world, "file" if kind == "cp" else kind, _Layers(other))
        with pytest.raises(CheckpointError) as error:
            others.load(path, loaded)
        errors.append(str(error.value))
    return errors


def test_states_of_other_parameters_are_refused_on_all_ranks(run_ranks: RankPool, tmp_path: Path) -> None:
    for errors in run_ranks(3, _refused, str(tmp_path), init=False):
        assert "groups of [3, 1] parameters, and this one has [2, 1]" in errors[0]
        assert "groups of [3, 1] parameters, and this one has [4]" in errors[1]
        assert "the saved optimizer had no parameter layers.0.weight" in errors[2]
        assert "the saved optimizer had no parameter layers.0.weight" in errors[3]
