"""Attention between split and gather, but outside of the planned blocks: exact on whole keys, refused on shards."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.errors import InterceptionError, PlanError
from lightning_cp.plans import Plan, split
from tests.dist.compare import averaged, outcome, worst
from tests.faults.engine.patched_parts import Attending, WithDiffusers, attend
from tests.harness import RankPool
from tests.harness.cases import full_unless
from tests.models.flux import flux

_EXACT = 1e-9
_PLAN = Plan({"blocks": {"x": split(1, "image")}}, {"proj_out": split(1, "image")})


class Block(nn.Module):
    """Attention without weights."""

    def forward(self, x: Tensor) -> Tensor:
        return x + attend(self, x)


class Model(nn.Module):
    """Blocks of attention, and modules before and after them that tests exchange. The text is whole on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Identity(), nn.ModuleList([Block(), Block()])
        self.text, self.norm_out, self.proj_out = nn.Identity(), nn.Identity(), nn.Linear(16, 3)

    def forward(self, x: Tensor, text: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = x + self.text(text).mean(1, keepdim=True)
        return (self.proj_out(self.norm_out(x)),)


class Wide(nn.Sequential):
    """The last layer, behind attention."""

    def __init__(self) -> None:
        super().__init__(Attending(), nn.Linear(16, 3).double())


def _by_model(model: Any) -> None:
    class Attends(type(model)):  # type: ignore[misc]
        def forward(self, x: Tensor, text: Tensor, return_dict: bool = True) -> tuple[Tensor]:
            for block in self.blocks:
                x = block(x)
            return (self.proj_out(attend(self, x)),)

    model.__class__ = Attends


_REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "after the blocks": (lambda model: setattr(model, "norm_out", Attending()), "^norm_out makes"),
    "of diffusers": (lambda model: setattr(model, "norm_out", WithDiffusers()), r"^norm_out\.attention makes"),
    "at the gather": (lambda model: setattr(model, "proj_out", Wide()), r"^proj_out\.0 makes"),
    "in the model's forward": (_by_model, "^the model itself makes"),
}


def _arguments(tokens: int, text: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"x": tokens, "text": text}
    return {name: torch.randn(2, n, 16, generator=generator, dtype=torch.float64) for name, n in sizes.items()}


def _refused(rank: int, world: int, before: bool, tokens: int) -> None:
    for change, message in _REFUSED.values():
        model, arguments = Model().double(), _arguments(tokens, 4)
        if before:
            change(model)
        attributes = set(model.__dict__)
        apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _PLAN)
        if not before:
            model(**arguments)
            change(model)
        for _ in range(2):  # it stays refused
            with pytest.raises((InterceptionError, PlanError), match=f"{message}|proj_out is another module"):
                model(**arguments)
        remove_context_parallel(model)
        assert set(model.__dict__) == attributes
        model(**arguments)


@pytest.mark.parametrize(
    ("before", "tokens"), full_unless(lambda before, tokens: before == (tokens == 9), product((True, False), (9, 11)))
)
def test_attention_on_shards_outside_of_the_blocks_is_refused(run_ranks: RankPool, before: bool, tokens: int) -> None:
    run_ranks(3, _refused, before, tokens)


def _followed(rank: int, world: int, text: int) -> tuple[float, float]:
    """Attention before the split, and over a text that is whole; the text may have as many tokens as a shard."""
    single, model, arguments = Model().double(), Model().double(), _arguments(9, text)
    for one in (single, model):
        one.embed, one.text = WithDiffusers(), Attending()
    expected, gradients = outcome(single, arguments)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _PLAN)
    out, found = outcome(model, arguments)
    return float((out - expected).abs().max()), worst(averaged(found, world), gradients)


@pytest.mark.parametrize("text", [3, 4, 9])
def test_attention_over_whole_tokens_outside_of_the_blocks_is_exact(run_ranks: RankPool, text: int) -> None:
    for output, gradient in run_ranks(3, _followed, text):
        assert output < _EXACT
        assert gradient < _EXACT


def _compiled(rank: int, world: int) -> None:
    arguments = _arguments(9, 4)
    model = Model().double()
    model.text = Attending()
    expected = model(**arguments)[0]
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _PLAN)
    assert (torch.compile(model, backend="eager")(**arguments)[0] - expected).abs().max() < _EXACT
    remove_context_parallel(model)
    model.norm_out = Attending()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _PLAN)
    with pytest.raises(Exception, match="norm_out makes an attention call outside of the plan's blocks"):
        torch.compile(model, backend="eager", fullgraph=True)(**arguments)


@pytest.mark.full
def test_attention_outside_of_compiled_blocks_is_followed_or_refused(run_ranks: RankPool) -> None:
    run_ranks(2, _compiled, timeout_s=240)


def _flux(rank: int, world: int) -> None:
    class Norm(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor, conditioning: Tensor) -> Tensor:
            x = self.norm(x, conditioning)
            return x + torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model, arguments = flux().build(), flux().arguments()
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world))
    model(**arguments)
    model.norm_out = Norm(model.norm_out)
    with pytest.raises(InterceptionError, match=r"^norm_out makes an attention call"):
        model(**arguments)


def test_an_attending_norm_of_a_model_of_diffusers_is_refused(run_ranks: RankPool) -> None:
    run_ranks(2, _flux)
