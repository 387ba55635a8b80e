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


def _adapt(model: Mixed, _: str = "", seed: int = 0) -> None:
    torch.manual_seed(seed)
    model.encoder = _Adapted(model.encoder)  # type: ignore[assignment]


def _cast(model: Mixed, _: str = "") -> None:
    model.double().float()  # exact


def _replace(model: Mixed, _: str = "") -> None:
    torch.manual_seed(3)
    model.plain.proj_out = nn.Linear(16, 3)


@torch.no_grad()
def _evaluate(model: Mixed, _: str = "") -> None:
    """Edit, freeze and unfreeze weights after an evaluation."""
    model(inputs())
    for x in model.plain.blocks.parameters():
        x.mul_(0.9)
    model.plain.blocks[0].requires_grad_(requires_grad=False)
    model.plain.proj_out.requires_grad_(requires_grad=True)


CHANGES: dict[str, Callable[[Mixed, str], None]] = {
    "unfreeze": _unfreeze,
    "adapter": _adapt,
    "cast": _cast,
    "replace": _replace,
    "evaluate": _evaluate,
}


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
    if how == "evaluate":
        settings["reshard_after_forward"] = False
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](**settings, **BY_PLAN))
    model = _frozen(kind)

    extra = 2 * (rank == 1) if how == "adapter" else 0  # a data group may run forwards of its own
    wrapped = fabric.setup(model)
    trained = _steps(model, lambda one: CHANGES[how](one, kind), wrapped, fabric, extra)
    expected, without = (_steps(_frozen(kind), x) for x in (lambda one: CHANGES[how](one, kind), lambda _: None))
    moved = 1.0 if len(trained) != len(without) else float((trained - without).norm() / without.norm())
    return float((trained - expected).norm() / expected.norm()), moved


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("cp", "unfreeze"),
        ("cp", "cast"),
        pytest.param("cp", "replace", marks=pytest.mark.full),
        pytest.param("cp", "adapter", marks=pytest.mark.full),
        ("cp_fsdp", "unfreeze"),
        ("cp_fsdp", "evaluate"),
    ],
)
def test_a_change_between_steps_trains_as_in_one_process(run_ranks: RankPool, kind: str, how: str) -> None:
    for error, moved in run_ranks(3, _followed, kind, how, init=False):
        assert error < 1e-5
        assert moved > 10 * error or how == "cast"  # which changes no value


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
    ring = 1 if how in ("unequal groups", "added") else world
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
            if how == "added":
                _adapt(model, seed=rank)
            elif how in ("cast", "replace"):
                model.double() if how == "cast" else _replace(model)
            elif "unequal" not in how or rank == 1:
                _unfreeze(model, "cp")
    except ValueError as error:
        return str(error)
    return "nothing was refused"


REFUSED = [
    ("cp", "unequal", "freeze the same weights, on every rank"),
    ("cp", "unequal groups", "freeze the same weights, on every rank"),
    ("cp", "within", "does not use the trained parameters encoder.weight, encoder.bias, head.weight"),
    ("cp", "added", "encoder.adapter.weight differs: checksum"),
    ("cp", "static", "static_graph=True does not support"),
    ("cp", "unused", "does not use the trained parameters spare.weight, spare.bias, so"),
    ("cp_fsdp", "unequal", "freeze the same weights, on every rank"),
    ("cp_fsdp", "cast", "were cast or moved (to torch.float64 on cpu) after the first forward"),
    ("cp_fsdp", "replace", "plain.proj_out.weight began to train after set-up and is not sharded"),
    ("cp_fsdp", "whole", "encoder.weight began to train after set-up and is not sharded"),
]


@pytest.mark.parametrize("kind", ["cp", "cp_fsdp"])
def test_what_cannot_be_followed_is_refused_on_every_rank(run_ranks: RankPool, kind: str) -> None:
    for how, message in [(how, message) for one, how, message in REFUSED if one == kind]:
        for said in run_ranks(3, _refused, kind, how, init=False):
            assert message in said


def _drawn(rank: int, world: int, name: str) -> tuple[str, int]:
    """Draw other numbers into a weight on each data group, after the third step."""
    fabric = fabric_of(rank, world, STRATEGIES["fabric", "cp"](ring=1, **BY_PLAN))
    model = Mixed(0)
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    for step in range(20):
        try:
            fabric.backward(wrapped(inputs()).square().mean() * 1e-3)
        except ValueError as error:
            return str(error), step
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                model.get_parameter(name).normal_(generator=torch.Generator().manual_seed(rank))
    return "nothing was refused", 0


@pytest.mark.parametrize("name", ["encoder.bias", pytest.param("plain.proj_out.bias", marks=pytest.mark.full)])
def test_other_values_in_replicated_weights_are_refused_on_every_rank(run_ranks: RankPool, name: str) -> None:
    for said, step in run_ranks(3, _drawn, name, init=False):
        assert f"{name} differs: checksum" in said
        assert "must draw the same numbers on every rank" in said
        assert step == 8
