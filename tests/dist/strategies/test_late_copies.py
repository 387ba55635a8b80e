"""Copies of weights that rank 0 alone has loaded in a hook: averages, teachers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.callbacks import EMACallback
from tests.dist.lightning_ranks import QUIET, flat, trainer_of
from tests.dist.strategies.test_initial_weights import BY_PLAN, STRATEGIES, Mixed, inputs
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


class Loads(Callback):
    """Loads weights on rank 0 in one hook: only those of `encoder`, which stays whole, or all."""

    def __init__(self, hook: str, *, only: str | None) -> None:
        self.hook, self.only = hook, only

    def _load(self, hook: str, module: nn.Module, *, is_first: bool) -> None:
        if hook == self.hook and is_first:
            loaded = Mixed(7) if self.only is None else Mixed(7).get_submodule(self.only)
            (module if self.only is None else module.get_submodule(self.only)).load_state_dict(loaded.state_dict())

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._load("on_fit_start", pl_module, is_first=trainer.is_global_zero)

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._load("on_train_start", pl_module, is_first=trainer.is_global_zero)


class Teachers(Callback):
    """Copies the encoder and the head in both hooks, after `Loads`."""

    early: nn.Module
    late: nn.Module

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.early = copy.deepcopy(pl_module.encoder)

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.late = copy.deepcopy(pl_module.encoder)
        self.only_on_rank_0 = nn.Linear(2, 2) if trainer.is_global_zero else None


class Validates(Mixed):
    """Small steps. `losses`: of each validation."""

    def __init__(self) -> None:
        super().__init__(3)
        self.losses: list[float] = []

    def validation_step(self, x: Tensor, _: int) -> None:
        self.losses.append(float(self(x).square().mean()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(trainer: Trainer, hook: str, average: Callback, only: str | None) -> list[float]:
    """Validation losses before and after two steps, and the teachers' weights."""
    module, teachers = Validates(), Teachers()
    # The order of the Trainer: the weights are loaded, then copied.
    trainer.callbacks[:0] = [Loads(hook, only=only), teachers, average]  # type: ignore[attr-defined]
    copies = DataLoader([inputs()[i] for _ in range(2) for i in range(2)], batch_size=2)  # type: ignore[arg-type]
    trainer.fit(module, copies, copies)
    return [*module.losses, *flat(teachers.early).tolist()[:5], *flat(teachers.late).tolist()[:5]]


def _average(kind: str) -> Callback:
    return EMACallback(0.9) if kind == "ours" else WeightAveraging()


def _on_ranks(rank: int, world: int, kind: str, cases: list[tuple[str, str]], only: str | None) -> list[list[float]]:
    found = []
    for hook, average in cases:
        strategy = STRATEGIES["trainer", kind](ring=world, **BY_PLAN)
        trainer = trainer_of(rank, world, strategy, max_steps=2, num_sanity_val_steps=1, limit_val_batches=1)
        found.append(_fit(trainer, hook, _average(average), only))
    return found


@pytest.mark.parametrize(
    ("kind", "cases", "only"),
    [
        ("cp", [("on_fit_start", "ours"), ("on_train_start", "ours"), ("on_fit_start", "lightnings")], None),
        ("cp_fsdp", [("on_fit_start", "ours")], "encoder"),
    ],
)
@pytest.mark.default(1)
def test_weights_loaded_on_the_first_rank_are_shared_before_they_are_copied(
    run_ranks: RankPool, kind: str, cases: list[tuple[str, str]], only: str | None
) -> None:
    by_rank = run_ranks(3, _on_ranks, kind, cases, only, init=False)
    for index, (hook, average) in enumerate(cases):
        alone = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=2,
            limit_val_batches=1,
            **{**QUIET, "num_sanity_val_steps": 1},  # type: ignore[arg-type]
        )
        expected = torch.tensor(_fit(alone, hook, _average(average), only))
        for found in by_rank:
            assert torch.allclose(torch.tensor(found[index]), expected, rtol=1e-5, atol=1e-6), (hook, average)
