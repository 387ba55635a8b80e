"""`strategy.grad`: the gradients of one process on every rank, in a step; torch's own function is refused there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.dist.lightning_ranks import BY_PLAN, STRATEGIES, distance, everyones, fabric_of, flat, trainer_of
from tests.dist.plain import Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


class _Model(LightningModule):
    """A transformer, and a weight that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.scale = Plain().double(), nn.Parameter(torch.ones(3).double())
        self.spare = nn.Parameter(torch.ones(2).double(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.plain(x)[0] * self.scale
        return out

    def penalized(self, out: Tensor, grad: Any) -> Tensor:
        """Return a loss with the norm of gradients, and one weighted by the norms of two losses."""
        loss, other = out.square().mean(), out.abs().mean()
        last = self.plain.proj_out.weight
        weights = [last, self.plain.blocks[1].out.bias, self.scale]
        norms = sum(x.square().sum() for x in grad(loss, weights, create_graph=True))
        first, second = (grad(one, last, retain_graph=True)[0].norm() for one in (loss, other))
        return loss + norms + first / second * other

    def training_step(self, x: Tensor, _: int) -> Tensor:
        return self.penalized(self(x), self.trainer.strategy.grad)  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([x for x in self.parameters() if x.requires_grad], lr=0.1)


def _inputs(sample: int) -> Tensor:
    return torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(sample), dtype=torch.float64)


def _losses(model: _Model, samples: range, grad: Any) -> Tensor:
    """Mean loss of samples that one process computes together: its penalties are those of the mean loss."""
    return model.penalized(torch.cat([model(_inputs(sample)) for sample in samples]), grad)


def _trained(rank: int, world: int, flavour: str, kind: str, degrees: dict[str, int]) -> Tensor:
    model, strategy = _Model(), STRATEGIES[flavour, kind](**degrees, **BY_PLAN)
    if flavour == "trainer":
        data: Any = torch.cat([_inputs(0), _inputs(0)])
        trainer_of(rank, world, strategy, max_steps=2).fit(model, DataLoader(data, batch_size=2))
        return flat(model)
    fabric = fabric_of(rank, world, strategy)
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    for _ in range(2):
        fabric.backward(model.penalized(wrapped(_inputs(0 if degrees else rank)), strategy.grad))
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize(
    ("world", "flavour", "kind", "degrees"),
    [
        (3, "fabric", "cp_fsdp", {"ring": 3}),
        (3, "fabric", "cp", {"ulysses": 3}),
        (3, "fabric", "cp", {}),
        (2, "trainer", "cp_fsdp", {"ulysses": 2}),
    ],
)
@pytest.mark.default(1)
def test_penalties_train_as_in_one_process(
    run_ranks: RankPool, world: int, flavour: str, kind: str, degrees: dict[str, int]
) -> None:
    alone = _Model()
    optimizer = alone.configure_optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        _losses(alone, range(1 if degrees else world), torch.autograd.grad).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for found in run_ranks(world, _trained, flavour, kind, degrees, init=False):
        assert distance(found, flat(alone)) < 1e-6  # `flat` is in float32


def _values(rank: int, world: int, kind: str, degrees: dict[str, int]) -> list[float]:
    """Errors of gradients of a loss, with respect to the weights and the input, for several arguments."""
    strategy = STRATEGIES["fabric", kind](**degrees, **BY_PLAN)
    fabric = fabric_of(rank, world, strategy)
    model, alone, groups = _Model(), _Model(), 1 if degrees else world
    wrapped = fabric.setup(model)
    errors = []
    for settings in ({}, {"allow_unused": True}, {"materialize_grads": True}, {"grad_outputs": torch.tensor(3.0)}):
        x, inputs = _inputs(rank % groups).requires_grad_(), [_inputs(i).requires_grad_() for i in range(groups)]
        optional = [("spare", 0)] if "grad_outputs" not in settings and settings else []
        for one in (model, alone):
            one.spare.requires_grad_(requires_grad=bool(optional) and kind == "cp")
        names = [name for name, value in alone.named_parameters() if name != "spare" or value.requires_grad]
        weights = [dict(model.named_parameters())[name] for name in names]
        grads = strategy.grad(wrapped(x).square().mean(), [*weights, x], **settings)
        loss = torch.cat([alone(one) for one in inputs]).square().mean()
        same = [*(dict(alone.named_parameters())[name] for name in names), *inputs]
        expected = list(torch.autograd.grad(loss, same, **settings))
        expected[len(names) :] = [groups * expected[len(names) + rank % groups]]  # of the mean of this data group only
        assert [x is None for x in grads] == [x is None for x in expected]
        pairs = [(a, b) for a, b in zip(grads, expected, strict=True) if a is not None and b is not None]
        errors += [float((a - b).abs().max()) for a, b in pairs]
        assert all(float(a.sum()) == other for a, _ in pairs[: len(names) - 1] for other in everyones(float(a.sum())))
    return errors


@pytest.mark.parametrize(
    ("kind", "world", "degrees"), [("cp", 3, {"ring": 3}), ("cp_fsdp", 3, {}), ("cp_fsdp", 2, {"ulysses": 2})]
)
@pytest.mark.default(2)
def test_gradients_of_one_process_on_every_rank(
    run_ranks: RankPool, kind: str, world: int, degrees: dict[str, int]
) -> None:
    for errors in run_ranks(world, _values, kind, degrees, init=False):
        assert max(errors) < 1e-14


def _refused(rank: int, world: int, kind: str) -> list[str]:
    strategy = STRATEGIES["fabric", kind](ring=world, **BY_PLAN)
    fabric = fabric_of(rank, world, strategy)
    model, plain = _Model(), nn.Linear(2, 2)
    wrapped = fabric.setup(model)
    loss, said = wrapped(_inputs(0)).square().mean(), []
    edge: Any = torch.autograd.graph.get_gradient_edge(model.plain.proj_out.bias) if kind == "cp" else None
    for inputs in (model.plain.proj_out.weight, [model.scale], edge, {"a": model.scale})[: 4 if kind == "cp" else 2]:
        with pytest.raises(ValueError, match=r"use strategy.grad\(outputs, inputs") as caught:
            torch.autograd.grad(loss, inputs, retain_graph=True)
        said.append(str(caught.value))
    square, weight = (lambda x: x.square().sum()), model.scale
    calls: list[Any] = [
        lambda: torch.func.grad(square)(weight.detach()),
        lambda: torch.func.vjp(square, weight)[1](torch.ones((), dtype=weight.dtype)),
        lambda: torch.autograd.functional.jacobian(square, weight),
        lambda: loss.backward(inputs=[weight]),
        lambda: fabric.backward(wrapped(_inputs(0)).sum(), inputs=[weight]),
    ]
    for call in calls if kind == "cp" else calls[-2:]:
        with pytest.raises(ValueError, match="rank's part of the gradient of "):
            call()
    torch.func.grad(square)(torch.ones(3))
    torch.autograd.grad(plain(torch.ones(2)).sum(), plain.weight)  # another module
    assert len(torch.autograd.grad(plain(torch.ones(2)).sum(), plain.parameters())) == 2  # the check leaves iterators
    torch.autograd.backward(plain(torch.ones(2)).sum(), inputs=plain.parameters())
    assert plain.bias.grad is not None
    strategy.teardown()
    torch.autograd.grad(model.scale.sum(), model.scale)
    return said


@pytest.mark.parametrize("kind", ["cp", "cp_fsdp"])
def test_torchs_own_function_is_refused_for_weights(run_ranks: RankPool, kind: str) -> None:
    for said in run_ranks(3, _refused, kind, init=False):
        assert "gradient of plain.proj_out.weight, because several ranks" in said[0]


class _Manual(_Model):
    """Calls its backward itself: not by the strategy unless `averaged`."""

    automatic_optimization, averaged = False, False

    def training_step(self, x: Tensor, _: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self(x).square().mean()
        nn.Linear(2, 2)(torch.ones(2)).sum().backward()  # another module
        (self.manual_backward if self.averaged else torch.Tensor.backward)(loss)
        optimizer.step()


def _by_hand(rank: int, world: int) -> tuple[str, list[Any]]:
    """Return the error, and everyone's weights after a step with `manual_backward`."""
    model, loader = _Manual(), DataLoader(_inputs(0), batch_size=2)  # type: ignore[arg-type]
    trainers = [
        trainer_of(rank, world, STRATEGIES["trainer", "cp"](ring=world, **BY_PLAN), max_steps=1) for _ in range(2)
    ]
    with pytest.raises(ValueError, match=r"use self\.manual_backward") as caught:
        trainers[0].fit(model, loader)
    model.averaged = True
    trainers[1].fit(model, loader)
    return str(caught.value), everyones(flat(model).tolist())


def test_a_backward_that_no_strategy_averages_is_refused(run_ranks: RankPool) -> None:
    for said, weights in run_ranks(3, _by_hand, init=False):
        assert weights == [weights[0]] * 3
        assert "rank's part of a gradient in scale.grad" in said


def _of_some_ranks(rank: int, world: int) -> tuple[float, str]:
    """Return the gradient of a weight that only the last rank uses, and the error for one that no rank uses."""
    fabric = fabric_of(rank, world, STRATEGIES["fabric", "cp"](ring=world, **BY_PLAN))
    model = _Model()
    wrapped = fabric.setup(model)
    loss = wrapped(_inputs(0)).square().mean() * 0 + (model.scale.sum() if rank == world - 1 else 0)
    (grad,) = fabric.strategy.grad(loss, [model.scale], retain_graph=True)  # type: ignore[attr-defined]
    model.spare.requires_grad_()
    with pytest.raises(RuntimeError) as error:
        fabric.strategy.grad(loss, [model.spare])  # type: ignore[attr-defined]
    return float(grad.sum()), str(error.value)


def test_a_weight_that_some_ranks_use_is_used(run_ranks: RankPool) -> None:
    for grad, error in run_ranks(3, _of_some_ranks, init=False):
        assert grad == pytest.approx(3 / 3)
        assert "is not used by the outputs, on any rank" in error


def _unlike(rank: int, world: int, kind: str) -> list[str]:
    """Pass other weights on the last rank, or run a backward there. Then an iterator, which all pass."""
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=world, **BY_PLAN))
    model, is_last, said = _Model(), rank == world - 1, []
    wrapped, grad = fabric.setup(model), fabric.strategy.grad  # type: ignore[attr-defined]
    a, b = model.scale, model.plain.proj_out.bias  # of one shape
    loss = wrapped(_inputs(0)).square().mean()
    for inputs, others in (([a, b], [b, a]), (a, [a, b]), ([a], None)):
        passed, is_backward = (others if is_last else inputs), is_last and others is None
        with pytest.raises(ValueError, match=" differs: ") as caught:
            _ = fabric.backward(loss, retain_graph=True) if is_backward else grad(loss, passed, retain_graph=True)
        said.append(str(caught.value))
    assert len(grad(loss, iter([a, b]))) == 2
    return said


@pytest.mark.parametrize("kind", ["cp", "cp_fsdp"])
@pytest.mark.default(1)
def test_ranks_that_call_it_in_other_ways_are_refused(run_ranks: RankPool, kind: str) -> None:
    for order, number, backward in run_ranks(3, _unlike, kind, init=False):
        assert order.startswith("input 0 differs: scale on rank 0, plain.proj_out.bias on rank 2")
        assert number.startswith("the number of inputs differs: 1 on rank 0, 2 on rank 2")
        assert backward.startswith("the call differs: strategy.grad on rank 0, a backward on rank 2")
