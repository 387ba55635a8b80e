"""`check_plan` finds and names differences, with the same result on every rank; the check must be able to fail."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, check_plan
from lightning_cp.plans import LOCAL, Plan, split
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool

_X = {"x": torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(1))}


class _Leaky(Plain):
    """A model with parameters that depend on the mean over tokens, and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.idle = nn.Linear(16, 16), nn.Linear(1, 1)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        for block in self.blocks:
            x = block(x)
            x = x + self.mean(x.mean(1, keepdim=True))  # over this rank's tokens only
        return (self.proj_out(x),)


def _plan(**attention: object) -> Plan:
    return Plan(
        blocks={"blocks": {"x": split(1, "image")}},
        attention=dict(attention),  # type: ignore[arg-type]
        gather={"proj_out": split(1, "image")},
    )


def _right(rank: int, world: int) -> str:
    torch.manual_seed(rank)  # each rank has other weights: the first one's are checked
    model, config = Plain(), ContextParallelConfig(ring_degree=world)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.train()
    for inputs in (_X, [_X["x"]]):
        for plan in (_plan(), PLAIN_PLAN):
            found = check_plan(model, inputs, config, plan)
            assert found.passed
            assert 0 < found.output_error < 1e-12
            assert {x.name for x in found.gradients} == {name for name, _ in model.named_parameters()}
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    return str(found)


def _wrong(rank: int, world: int) -> tuple[str, list[str]]:
    torch.manual_seed(0)
    found = check_plan(_Leaky(), _X, ContextParallelConfig(ring_degree=world), _plan())
    assert not found.passed
    return str(found), [x.name for x in found.differing]


def _unseen(rank: int, world: int) -> tuple[float, float]:
    """Attention that stays on its rank, and a zero output that would hide it."""
    torch.manual_seed(0)
    model = Plain()
    nn.init.zeros_(model.proj_out.weight)
    found = check_plan(model, _X, ContextParallelConfig(ulysses_degree=world), _plan(**{"": LOCAL}))
    return found.output_error, found.gradient_error


def test_a_right_plan_passes_and_the_model_is_left_as_it_was(run_ranks: RankPool) -> None:
    told = run_ranks(3, _right)
    assert len(set(told)) == 1
    assert told[0].startswith("1 output: largest error")


def test_a_wrong_plan_raises_the_same_error_on_every_rank(run_ranks: RankPool) -> None:
    told = run_ranks(3, _wrong)
    assert len({text for text, _ in told}) == 1
    text, names = told[0]
    assert names[0] == "output[0]"
    assert "mean.weight" in names
    assert "idle.weight" not in names
    assert "gradient mean.weight: " in text


def test_weights_that_are_all_zero_hide_nothing(run_ranks: RankPool) -> None:
    for output, gradient in run_ranks(3, _unseen):
        assert output > 1e-3
        assert gradient > 1e-3
