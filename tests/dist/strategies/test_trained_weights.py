"""Parameters that begin to train after set-up are averaged, or refused on every rank; so are unused ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.dist.lightning_ranks import fabric_of, flat, trainer_of
from tests.dist.strategies.test_initial_weights import BY_PLAN, STRATEGIES, Mixed, inputs
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


def _frozen(kind: str) -> Mixed:
    """Return a module in which `_unfreeze` unfreezes weights; under FSDP2, weights that are sharded."""
    model = Mixed(0)
    for child in (model.head, *([model.plain.proj_out] if kind == "cp_fsdp" else [])):
        child.requires_grad_(requires_grad=False)
    return model


def _unfreeze(model: Mixed, kind: str) -> None:
    (model.plain.proj_out if kind == "cp_fsdp" else model).requires_grad_(requires_grad=True)


class _Adapted(nn.Module):
    """A layer and an adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)  # type: ignore[no-any-return]


def _adapt(model: Mixed, seed: int) -> None:
    torch.manual_seed(seed)
    model.encoder = _Adapted(model.encoder)  # type: ignore[assignment]


def _steps(
    model: Mixed, change: Callable[[Mixed], None], wrapped: Any = None, fabric: Any = None, extra: int = 0
) -> Tensor:
    """Train two steps, the second one in two micro-steps after a change between them.

    Args: extra: forwards with gradients before the first step that no backward follows.
    """
    wrapped = wrapped or model
    for _ in range(extra):
        wrapped(inputs())
    for step in range(2):
        for micro in range(step + 1):
            loss = lambda: wrapped(inputs()).square().mean()  # noqa: E731
            if fabric is None:
                loss().backward()
            else:
                with fabric.no_backward_sync(wrapped, enabled=micro < step):
                    fabric.backward(loss())
            if micro < step:
                change(model)
        with torch.no_grad():
            for x in model.parameters():
                if x.grad is not None:
                    x -= x.grad
                    x.grad = None
    return flat(model)


def _followed(rank: int, world: int, kind: str, how: str) -> tuple[float, float]:
    """Difference from one process, and from one process without the change."""
    settings: dict[str, Any] = {"ring": 1, "broadcast_buffers": False} if how == "adapter" else {"ring": world}
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](**settings, **BY_PLAN))
    model = _frozen(kind)

    def change(one: Mixed, seed: int = 0) -> None:
        return _adapt(one, seed) if how == "adapter" else _unfreeze(one, kind)

    extra = 2 * (rank == 1) if how == "adapter" else 0  # a data group may run forwards of its own
    trained = _steps(model, lambda one: change(one, rank), fabric.setup(model), fabric, extra)
    expected, without = _steps(_frozen(kind), change), _steps(_frozen(kind), lambda _: None)
    moved = 1.0 if len(trained) != len(without) else float((trained - without).norm() / without.norm())
    return float((trained - expected).norm() / expected.norm()), moved


@pytest.mark.parametrize(
    ("kind", "how"),
    [("cp", "unfreeze"), pytest.param("cp", "adapter", marks=pytest.mark.full), ("cp_fsdp", "unfreeze")],
)
def test_a_change_between_steps_trains_as_in_one_process(run_ranks: RankPool, kind: str, how: str) -> None:
    for error, moved in run_ranks(3, _followed, kind, how, init=False):
        assert error < 1e-5
        assert moved > 10 * error


class _Unfreezes(Mixed):
    """Unfreezes its layers in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.requires_grad_(requires_grad=True)


def _fitted(rank: int, world: int) -> float:
    model = _Unfreezes(0)
    model.head.requires_grad_(requires_grad=False)
    data: Any = [inputs()[i] for i in range(2)]
    trainer_of(rank, world, STRATEGIES["trainer", "cp"](ring=world, **BY_PLAN), max_epochs=2).fit(
        model, DataLoader(data, batch_size=2)
    )
    alone = _Unfreezes(0)
    alone.head.requires_grad_(requires_grad=False)
    optimizer = alone.configure_optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        alone(inputs()).square().mean().backward()
        optimizer.step()
        alone.requires_grad_(requires_grad=True)
    return float((flat(model) - flat(alone)).norm() / flat(alone).norm())


def test_the_trainer_follows_a_layer_unfrozen_in_a_later_epoch(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _fitted, init=False)) < 1e-5


class _WithUnused(Mixed):
    """Has a trained layer that its loss does not use."""

    def __init__(self) -> None:
        super().__init__(0)
        self.spare = nn.Linear(3, 3)


def _refused(rank: int, world: int, kind: str, how: str) -> str:
    settings = {"static_graph": True} if how == "static" else {}
    ring = 1 if how == "unequal groups" else world
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=ring, **BY_PLAN, **settings))
    model = _WithUnused() if how == "unused" else _frozen("cp")
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    try:
        for _ in range(2):
            loss = wrapped(inputs()).square().mean()
            if how == "within":
                _unfreeze(model, "cp")
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if "unequal" not in how or rank == 1:
                _unfreeze(model, "cp")
    except ValueError as error:
        return str(error)
    return "nothing was refused"


REFUSED = [
    ("cp", "unequal", "freeze the same weights, on every rank"),
    ("cp", "unequal groups", "freeze the same weights, on every rank"),
    ("cp", "within", "encoder.weight began to train within a step"),
    ("cp", "static", "static_graph=True does not support"),
    ("cp", "unused", "does not use the trained parameters spare.weight, spare.bias, so"),
    ("cp_fsdp", "unequal", "freeze the same weights, on every rank"),
    ("cp_fsdp", "whole", "encoder.weight began to train after set-up and is not sharded"),
]


@pytest.mark.parametrize("kind", ["cp", "cp_fsdp"])
def test_what_cannot_be_followed_is_refused_on_every_rank(run_ranks: RankPool, kind: str) -> None:
    for how, message in [(how, message) for one, how, message in REFUSED if one == kind]:
        for said in run_ranks(3, _refused, kind, how, init=False):
            assert message in said
